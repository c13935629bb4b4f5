"""Causal attention over packed samples without attention across samples, for both trainers.

A segment is a run of queries that attends to a run of keys which ends at the last query: a whole
sample, or under context parallelism one of the two zigzag chunks of it that a rank holds.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # pragma: no cover - torch without the kernel
    varlen_attn = None

logger = logging.getLogger(__name__)

# Samples share a padded SDPA call if the shortest has at least this fraction of the longest's
# tokens. Below it the padding costs more than another call.
_MIN_LENGTH_RATIO = 0.8
# From this length on, cuDNN computes a sample on Hopper GPUs. It compiles a graph for every new length, and
# some of its releases are wrong for odd ones, so lengths are padded to multiples of _LONG_STEP.
LONG_SAMPLE, _LONG_STEP = 4096, 512
# What torch and cuDNN say of tensors for which they have no kernel
_NO_KERNEL = re.compile(
    "No (available kernel|viable backend|(valid )?execution plans|valid engine configs)"
)
_refused: set[tuple[object, ...]] = set()  # sizes and dtypes of samples


@dataclass(frozen=True)
class PackedRun:
    """Neighbouring samples for one call of a kernel: one long sample, or any number of shorter ones."""

    tokens: int
    longest: int
    cu_seqlens: torch.Tensor | None  # [samples + 1] int32; None: a long sample
    padding: int = 0  # tokens appended to a long sample


@dataclass(frozen=True)
class PackedLayout:
    """Sample boundaries of a micro-batch, computed once and used by every layer.

    Neighbours of similar length share one SDPA call as a right-padded batch. Causal attention needs
    no mask for right padding, since it follows every real token. Samples of lengths 6, 5 and 9 at
    packed positions 0..5, 6..10 and 11..19::

        groups  = ((2, 6), (1, 9))                       samples and padded length of each call
        gather  = [0, ..., 9, 10, 10, 11, ..., 19]       packed position of each padded position
        scatter = [0, ..., 9, 10, 12, ..., 20]           padded position of each packed position
    """

    cu_seqlens: torch.Tensor  # [N+1] int32
    max_seqlen: int
    runs: tuple[PackedRun, ...]  # empty without a long sample
    groups: tuple[tuple[int, int], ...]
    gather: torch.Tensor | None  # None without padding
    scatter: torch.Tensor | None
    lens: tuple[int, ...]


def packed_layout(lens: list[int], device: torch.device) -> PackedLayout:
    """Return the layout of concatenated samples of these lengths."""
    groups = tuple(_groups(lens))
    gather = scatter = None
    if sum(count * length for count, length in groups) > sum(lens):
        gather, scatter = (index.to(device) for index in _indices(lens, groups))
    runs = tuple(_runs(lens, device)) if max(lens) >= LONG_SAMPLE else ()
    return PackedLayout(
        _offsets(lens, device), max(lens), runs, groups, gather, scatter, tuple(lens)
    )


def attend_packed(
    query: torch.Tensor,  # [T, heads, D]
    key: torch.Tensor,  # [T, kv heads, D]
    value: torch.Tensor,  # [T, kv heads, Dv]
    layout: PackedLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:
    """Return [T, heads, Dv]. `sinks` adds a learned logit per head to each softmax denominator."""
    if window is not None and window >= layout.max_seqlen:
        window = None
    if sinks is None and _has_varlen_kernel(query, value):
        if window is None and layout.max_seqlen >= LONG_SAMPLE and _has_long_kernel(query):
            return _attend_runs(query, key, value, layout, scale)
        offsets = (layout.cu_seqlens, layout.cu_seqlens)
        longest = (layout.max_seqlen, layout.max_seqlen)
        return _call_varlen_kernel(query, key, value, offsets, longest, scale, window)
    return _attend_padded(query, key, value, layout, scale, window, sinks)


def attend_segments(
    query: torch.Tensor,  # [sum of query lengths, heads, D]
    key: torch.Tensor,  # [sum of key lengths, kv heads, D]
    value: torch.Tensor,
    lens: tuple[tuple[int, ...], tuple[int, ...]],  # query and key lengths of each segment
    offsets: tuple[torch.Tensor, torch.Tensor],  # their cumulative sums, int32
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `attend_packed`, for segments with more keys than queries (zigzag chunks of context parallelism)."""
    if sinks is None and _has_varlen_kernel(query, value):
        longest = (max(lens[0]), max(lens[1]))
        return _call_varlen_kernel(query, key, value, offsets, longest, scale, window)
    outs = []
    parts = zip(query.split(lens[0]), key.split(lens[1]), value.split(lens[1]), strict=True)
    for part in parts:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in part)  # [1, heads, L, D]
        out = _attend(q, k, v, scale, window, sinks)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def _has_varlen_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    fast = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return fast and varlen_attn is not None and query.shape[-1] == value.shape[-1]


def _call_varlen_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    assert varlen_attn is not None
    options: dict[str, Any] = {"scale": scale}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in _VARLEN_OPTIONS:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    options["window_size"] = (window - 1 if window else -1, 0)
    out = varlen_attn(query, key, value, *offsets, *longest, **options)
    assert isinstance(out, torch.Tensor), "no auxiliary outputs were requested"
    return out


_VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}


def repeats_keys() -> bool:
    """Return whether K and V are repeated per query head: this torch's kernel has no GQA."""
    return "enable_gqa" not in _VARLEN_OPTIONS


def _has_long_kernel(query: torch.Tensor) -> bool:
    fits = query.shape[-1] <= 128 and query.shape[-1] % 8 == 0
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    # Its backward pass adds in any order.
    any_order = not torch.are_deterministic_algorithms_enabled()
    return fits and allowed and any_order and _is_hopper(query.device)


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def _attend_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
) -> torch.Tensor:
    sizes = [run.tokens for run in layout.runs]
    parts = (x.split(sizes) for x in (query, key, value))
    # Padded samples are saved as copies. Views of the others would keep all tokens a second time.
    copies = any(run.padding for run in layout.runs)
    outs = []
    for run, *part in zip(layout.runs, *parts, strict=True):
        q, k, v = (x.clone() for x in part) if copies and not run.padding else part
        if run.cu_seqlens is None:
            outs.append(_attend_long(q, k, v, run.padding, scale))
        else:
            offsets, longest = (run.cu_seqlens, run.cu_seqlens), (run.longest, run.longest)
            outs.append(_call_varlen_kernel(q, k, v, offsets, longest, scale, None))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_long(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: int, scale: float | None
) -> torch.Tensor:
    """Attend within one sample by cuDNN, padded at its end, where causal attention needs no mask.

    The varlen kernel takes sizes that cuDNN refused, in a recomputed forward pass as well.
    """
    tokens = len(query) + padding
    size = (tokens, *query.shape[1:], key.shape[1], query.dtype)
    if size not in _refused:
        inputs = (query, key, value)
        if padding:
            inputs = tuple(F.pad(x, (0, 0, 0, 0, 0, padding)) for x in inputs)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in inputs)  # [1, heads, L, D]
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=True
                )
            return out.squeeze(0).transpose(0, 1)[: len(query)]
        except RuntimeError as error:
            if not _NO_KERNEL.search(str(error)):
                raise
            if not _refused:
                logger.warning(
                    "cuDNN %s has no attention for samples of %d tokens with %d heads of %d: torch's "
                    "kernel computes them, more slowly",
                    *(torch.backends.cudnn.version(), tokens, *query.shape[1:]),
                )
            _refused.add(size)
    offsets = _offsets([len(query)], query.device)
    return _call_varlen_kernel(
        query, key, value, (offsets, offsets), (len(query), len(query)), scale, None
    )


def _attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Pad to SDPA batches, attend, unpad."""
    if layout.gather is not None:
        query, key, value = (x.index_select(0, layout.gather) for x in (query, key, value))
    sizes = [count * length for count, length in layout.groups]
    parts = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
    outs = []
    for group, part in zip(layout.groups, parts, strict=True):
        q, k, v = (x.unflatten(0, group).transpose(1, 2) for x in part)  # [n, heads, L, D]
        out = _attend(q, k, v, scale, window, sinks)
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [n * L, heads, D]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if layout.scatter is None else out.index_select(0, layout.scatter)


def _attend(
    query: torch.Tensor,  # [n, heads, Lq, D]
    key: torch.Tensor,  # [n, kv heads, Lk, D]
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    plain = num_queries == num_keys and window is None and sinks is None
    mask = None if plain else causal_mask(num_queries, num_keys, window, query.device)
    if mask is None or sinks is None:
        gqa = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=plain, scale=scale, enable_gqa=gqa
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, float("-inf"))
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], dim=-1).float().softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return [Lq, Lk], true where a query attends to a key; the last query is at the last key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query[:, None] - torch.arange(num_keys, device=device)[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def _offsets(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(device=device, dtype=torch.int32)


def _runs(lens: list[int], device: torch.device) -> Iterator[PackedRun]:
    for long, group in groupby(lens, lambda length: length >= LONG_SAMPLE):
        members = list(group)
        if long:
            yield from (PackedRun(n, n, None, -n % _LONG_STEP) for n in members)
        else:
            yield PackedRun(sum(members), max(members), _offsets(members, device))


def _groups(lens: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (samples, padded length) of runs of similar length; callers sort rows by length."""
    first = 0
    while first < len(lens):
        low = high = lens[first]
        last = first + 1
        while last < len(lens):
            low, high = min(low, lens[last]), max(high, lens[last])
            if low < _MIN_LENGTH_RATIO * high:
                break
            last += 1
        yield last - first, max(lens[first:last])
        first = last


def _indices(
    lens: list[int], groups: tuple[tuple[int, int], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    gather, real = [], []
    first = start = 0
    for count, longest in groups:
        sizes = torch.tensor(lens[first : first + count])
        column = torch.arange(longest).expand(count, longest)
        starts = start + sizes.cumsum(0) - sizes
        gather.append((starts[:, None] + column.minimum(sizes[:, None] - 1)).flatten())
        real.append((column < sizes[:, None]).flatten())
        first, start = first + count, start + int(sizes.sum())
    return torch.cat(gather), torch.cat(real).nonzero().squeeze(1)
