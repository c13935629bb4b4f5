"""Attention over the paged KV cache, given to Hugging Face models as an attention implementation.

A forward has T token rows, each belonging to some sequence. Rows that attend in the same way form a
group: a rectangle of B sequences with Q query rows each over L cached positions. Within a group keys
and values are gathered page by page and one scaled-dot-product call does the rest. Query heads that
share a key head are laid out as further query rows, so keys are never repeated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from slime.engine.cache.dense_cache import DenseRows
from slime.engine.cache.kv_cache import KVCache, LayerShape

IMPLEMENTATION = "slime_paged"


@dataclass(kw_only=True, eq=False)
class AttentionGroup:
    """B sequences x Q query rows over L positions, which lie in pages or in rows of the dense cache.

    `rows` are the token rows of the queries, [B*Q]; a slice when they lie in order without padding.
    `positions` is where each query stands in its sequence, [B, Q]; padding queries stand at 0.
    """

    rows: slice | torch.Tensor
    source: torch.Tensor | DenseRows  # page numbers [B * L/page_size], or dense rows
    positions: torch.Tensor  # [B, Q]
    kv_len: int
    valid: torch.Tensor | None = None  # indices into B*Q of the queries that are no padding
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query may look and -inf elsewhere, [B, 1, repeat*Q, L]; made once for all layers."""
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
    slots: torch.Tensor  # [T] where the keys and values of each row go
    groups: list[AttentionGroup]


class _Current(threading.local):
    """The forward running in this thread; models hand through no argument of ours reliably."""

    plan: AttentionPlan | None = None
    probe: dict[int, LayerShape] | None = None


_current = _Current()


class use_plan:
    """Attention inside the `with` follows this plan."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        _current.plan = self._plan

    def __exit__(self, *_: object) -> None:
        _current.plan = None


class record_layers:
    """Attention inside the `with` computes nothing and notes what each layer would store."""

    def __enter__(self) -> dict[int, LayerShape]:
        _current.probe = {}
        return _current.probe

    def __exit__(self, *_: object) -> None:
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
    """The signature of transformers' attention functions; returns [1, T, Hq, Dv]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = attend(layer, query, key, value, scale, sliding_window, softcap, s_aux)
    return output.unsqueeze(0).contiguous(), None  # some models take a view of it


def attend(
    layer: int,
    query: torch.Tensor,  # [T, Hq, D]
    key: torch.Tensor,  # [T, Hkv, D]
    value: torch.Tensor,  # [T, Hkv, Dv]
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store keys and values of the T rows, then let their queries look at all they may: [T, Hq, Dv]."""
    if _current.probe is not None:
        _record(_current.probe, layer, key, value)
        return query.new_zeros(*query.shape[:2], value.shape[2])
    plan = _current.plan
    assert plan is not None, "paged attention outside of the engine"
    plan.cache.write(layer, plan.slots, key, value)
    results = [
        _attend(plan.cache, layer, group, (query, key, value), scale, window, softcap, sinks)
        for group in plan.groups
    ]
    if len(results) == 1 and plan.groups[0].valid is None:
        return results[0]
    output = results[0].new_empty(query.shape[0], *results[0].shape[1:])
    for group, result in zip(plan.groups, results, strict=True):
        if group.valid is None:
            output[group.rows] = result
        else:
            output[group.rows[group.valid]] = result[group.valid]  # type: ignore[index]
    return output


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def _attend(
    cache: KVCache,
    layer: int,
    group: AttentionGroup,
    projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # query, key, value [T, H, D]
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B*Q, Hq, Dv]"""
    batch, q_len = group.positions.shape
    shape = cache.layers[layer]
    query = projected[0][group.rows]
    heads, repeat = shape.num_heads, query.shape[1] // shape.num_heads
    if isinstance(group.source, DenseRows):
        group.source.write(layer, projected[1][group.rows], projected[2][group.rows])
        keys, values = group.source.read(layer, group.kv_len)
    else:
        keys = cache.keys[layer].index_select(0, group.source)
        values = cache.values[layer].index_select(0, group.source)
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
        result = _attend_in_steps(query, keys, values, mask, scale, softcap, sinks)
    if q_len == 1:
        return result.reshape(batch, heads * repeat, -1)
    result = result.reshape(batch, heads, repeat, q_len, -1).permute(0, 3, 1, 2, 4)
    return result.reshape(batch * q_len, heads * repeat, -1)


def _attend_in_steps(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hq]
) -> torch.Tensor:
    """Attention with capped scores or with a learned sink per head, which no fused kernel has."""
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
