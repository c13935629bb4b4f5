"""Causal attention over packed samples that never mixes them, for any Hugging Face model.

Registered with transformers under the name `slime_packed`. Transformers builds no mask for a name it
has no mask function for; where the samples lie comes with the keyword `packed`, which every model
hands down to its attention function.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from slime.utils.errors import UserError
from slime.utils.types import TrainBatch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # pragma: no cover - torch without the kernel
    varlen_attn = None

PACKED_ATTENTION = "slime_packed"

# Two samples share one padded call when the shorter has at least this part of the longer's tokens.
# Below it the padding costs more than another call.
_SHARE_CALL = 0.8


@dataclass(frozen=True)
class PackedLayout:
    """Where the samples of a micro-batch lie; made once, used by every layer.

    Neighbours of similar length are attended to in one call, as a batch padded on the right. Causal
    attention needs no mask for such padding: it lies behind every real token. Samples of lengths 3, 2
    and 9 at packed positions 0..2, 3..4 and 5..13::

        groups  = ((2, 3), (1, 9))                       samples and padded length of each call
        gather  = [0, 1, 2, 3, 4, 4, 5, ..., 13]         packed position of each padded position
        scatter = [0, 1, 2, 3, 4, 6, ..., 14]            padded position of each packed position
    """

    cu_seqlens: torch.Tensor  # [N+1] int32
    max_seqlen: int
    groups: tuple[tuple[int, int], ...]
    gather: torch.Tensor | None  # None where nothing is padded
    scatter: torch.Tensor | None


def packed_layout(batch: TrainBatch) -> PackedLayout:
    lens = [p + r for p, r in zip(batch.prompt_lens, batch.response_lens, strict=True)]
    groups = tuple(_groups(lens))
    gather = scatter = None
    if sum(count * length for count, length in groups) > sum(lens):
        gather, scatter = (index.to(batch.tokens.device) for index in _indices(lens, groups))
    return PackedLayout(batch.cu_seqlens, batch.max_seqlen, groups, gather, scatter)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, D]
    key: torch.Tensor,  # [1, kv heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """[1, T, heads, D]. Dropout is not applied: log-probs must not depend on a draw."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} needs attention with {name}, which {PACKED_ATTENTION} has not; "
                "give an implementation that has it, e.g. --attn-implementation flash_attention_2 or eager"
            )
    window = sliding_window if sliding_window and sliding_window < packed.max_seqlen else None
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    if query.is_cuda and varlen_attn is not None and query.dtype in (torch.bfloat16, torch.float16):
        out = _varlen(query, key, value, packed, scaling, window)
    else:
        out = _padded(query, key, value, packed, scaling, window)
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    cu, longest = packed.cu_seqlens, packed.max_seqlen
    options: dict[str, object] = {"scale": scaling}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in _VARLEN_OPTIONS:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    options["window_size"] = (window - 1 if window else -1, 0)
    return varlen_attn(query, key, value, cu, cu, longest, longest, **options)


_VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters if varlen_attn is not None else {}


def _padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    gqa = key.shape[1] != query.shape[1]
    if packed.gather is not None:
        query, key, value = (x.index_select(0, packed.gather) for x in (query, key, value))
    sizes = [count * length for count, length in packed.groups]
    parts = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
    outs = []
    for group, part in zip(packed.groups, parts, strict=True):
        q, k, v = (x.unflatten(0, group).transpose(1, 2) for x in part)  # [n, heads, L, D]
        mask = _window_mask(group[1], window, q.device) if window else None
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))  # [n * L, heads, D]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if packed.scatter is None else out.index_select(0, packed.scatter)


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """[L, L], true where a query may look: itself and the window - 1 tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _groups(lens: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive samples of similar length; callers pack rows in order of length to help this."""
    first = 0
    while first < len(lens):
        low = high = lens[first]
        last = first + 1
        while last < len(lens):
            low, high = min(low, lens[last]), max(high, lens[last])
            if low < _SHARE_CALL * high:
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
