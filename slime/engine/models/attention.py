"""Attention over the paged KV cache, given to Hugging Face models as an attention implementation.

Only the plain execution path uses it. The T tokens of a forward are cut into groups of equal shape: B
sequences with Q queries each over L cached positions, where B or Q is 1. Per group the pages are gathered
and one scaled-dot-product call does the rest. Query heads that share a key head (GQA) are laid out as
further query rows, so keys are never repeated.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from slime.engine.kv_cache import KVCache, LayerShape
from slime.engine.scheduler.step import StepBatch

if TYPE_CHECKING:
    from slime.engine.models.delta_net import StatePlan

IMPLEMENTATION = "slime_paged"
_MAX_QUERIES = 512  # of one group: bounds its mask, and skips positions that are masked anyway


@dataclass(kw_only=True, eq=False)
class AttentionGroup:
    """B sequences x Q queries over the L positions of their pages."""

    tokens: slice | torch.Tensor  # which of the T tokens the B*Q queries are
    pages: torch.Tensor  # page numbers [B * L/page_size]
    positions: torch.Tensor  # [B, Q] of each query in its sequence
    kv_len: int  # L
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 where a query attends and -inf elsewhere, [B, 1, repeat*Q, L]; made once for all layers."""
        key = (window, repeat)
        if key not in self._masks:
            seen = torch.arange(self.kv_len, device=self.positions.device)
            hidden = seen > self.positions.unsqueeze(-1)
            if window is not None:
                hidden |= seen <= self.positions.unsqueeze(-1) - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            if self.positions.shape[1] > 1:
                mask = mask.repeat(1, repeat, 1)
            self._masks[key] = mask.unsqueeze(1)
        return self._masks[key]


@dataclass(kw_only=True, eq=False)
class AttentionPlan:
    """Everything attention needs in one forward, the same for all layers."""

    cache: KVCache
    slots: torch.Tensor  # [T] where the keys and values of each token are stored
    groups: list[AttentionGroup]
    states: StatePlan | None = None  # of models with recurrent layers


def plan_attention(batch: StepBatch, page_table: np.ndarray, cache: KVCache) -> AttentionPlan:
    """Cut the tokens of a forward into groups of equal shape.

    Sequences with one query are grouped by the number of pages they need, rounded up. That number follows
    only from the position, so the shape of a token's attention does not depend on other tokens.
    """
    size, positions, rows = cache.page_size, batch.positions.astype(np.int64), batch.rows
    slots = page_table[rows, positions // size].astype(np.int64) * size + positions % size
    counts = np.array(batch.counts, np.int64)
    starts = np.cumsum(counts) - counts

    def group(tokens: slice | np.ndarray, num_pages: int, *, q_len: int) -> AttentionGroup:
        sequences = rows[tokens][::q_len]
        return AttentionGroup(
            tokens=tokens if isinstance(tokens, slice) else _to_device(tokens, cache),
            pages=_to_device(page_table[sequences, :num_pages].reshape(-1), cache),
            positions=_to_device(positions[tokens].reshape(-1, q_len), cache),
            kv_len=num_pages * size,
        )

    single = starts[counts == 1]
    needed = _round_up_pages(positions[single] // size + 1, page_table.shape[1])
    groups = [group(single[needed == pages], int(pages), q_len=1) for pages in np.unique(needed)]
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        for first in range(start, start + count, _MAX_QUERIES):
            end = min(first + _MAX_QUERIES, start + count)
            num_pages = int(positions[end - 1]) // size + 1
            groups.append(group(slice(first, end), num_pages, q_len=end - first))
    return AttentionPlan(cache=cache, slots=_to_device(slots, cache), groups=groups)


def _round_up_pages(pages: np.ndarray, most: int) -> np.ndarray:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ..., at most `most`."""
    power = 1 << np.ceil(np.log2(np.maximum(pages, 1))).astype(np.int64)
    three_quarters = power // 4 * 3
    rounded = np.where((power >= 4) & (three_quarters >= pages), three_quarters, power)
    return np.minimum(rounded, most)


def _to_device(array: np.ndarray, cache: KVCache) -> torch.Tensor:
    return torch.from_numpy(array).to(cache.device)


class _Current(threading.local):
    """The plan of the forward in this thread, since models do not reliably pass extra arguments on."""

    plan: AttentionPlan | None = None
    probe: dict[int, LayerShape] | None = None


_current = _Current()


def current_plan() -> AttentionPlan | None:
    """Return the plan of the engine's forward in this thread; None outside of one."""
    return _current.plan


@contextlib.contextmanager
def use_plan(plan: AttentionPlan) -> Iterator[None]:
    """Make attention follow this plan."""
    _current.plan = plan
    try:
        yield
    finally:
        _current.plan = None


@contextlib.contextmanager
def record_layers() -> Iterator[dict[int, LayerShape]]:
    """Make attention only record what each layer would store."""
    _current.probe = {}
    try:
        yield _current.probe
    finally:
        _current.probe = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Store keys and values of the T tokens, then attend; the signature of transformers' attention functions.

    Returns [1, T, Hq, Dv], contiguous because some models take a view of it.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    output = query.new_zeros(*query.shape[:2], value.shape[2])
    if _current.probe is not None:
        _record(_current.probe, layer, key, value)
        return output.unsqueeze(0), None
    plan = _current.plan
    assert plan is not None, "paged attention outside of the engine"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    plan.cache.write(layer, plan.slots, key, value)
    for group in plan.groups:
        output[group.tokens] = _attend(
            plan.cache, layer, group, query[group.tokens], scale, sliding_window, softcap, s_aux
        )
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def _attend(
    cache: KVCache,
    layer: int,
    group: AttentionGroup,
    query: torch.Tensor,  # [B*Q, Hq, D]
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [B*Q, Hq, Dv]."""
    batch, q_len = group.positions.shape
    heads = cache.layers[layer].num_heads
    repeat = query.shape[1] // heads
    keys = cache.keys[layer].index_select(0, group.pages)
    values = cache.values[layer].index_select(0, group.pages)
    keys = keys.view(batch, group.kv_len, heads, -1)
    values = values.view(batch, group.kv_len, heads, -1)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [B, Hkv, L, D]
    if q_len == 1:
        query = query.reshape(batch, heads, repeat, -1)
    else:  # [B, Q, Hkv, repeat, D] -> [B, Hkv, repeat*Q, D]
        query = query.reshape(batch, q_len, heads, repeat, -1).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, heads, repeat * q_len, -1)
    mask = group.mask(window, repeat, query.dtype)
    if softcap is None and sinks is None:
        result = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    else:
        result = _attend_unfused(query, keys, values, mask, scale, softcap, sinks)
    if q_len == 1:
        return result.reshape(batch, heads * repeat, -1)
    result = result.reshape(batch, heads, repeat, q_len, -1).permute(0, 3, 1, 2, 4)
    return result.reshape(batch * q_len, heads * repeat, -1)


def _attend_unfused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hq]
) -> torch.Tensor:
    """Compute attention with a softcap or with a learned sink per head, which SDPA does not support."""
    scores = (query @ keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        heads, length = scores.shape[1], scores.shape[2]
        per_head = sinks.float().view(heads, -1, 1)
        column = per_head.expand(heads, -1, length // per_head.shape[1]).reshape(
            1, heads, length, 1
        )
        scores = torch.cat([scores, column.expand(scores.shape[0], -1, -1, -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


def _record(
    layers: dict[int, LayerShape], layer: int, key: torch.Tensor, value: torch.Tensor
) -> None:
    if layer in layers:
        raise NotImplementedError(f"layer {layer} attends twice")
    layers[layer] = LayerShape(
        num_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2]
    )
