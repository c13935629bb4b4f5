"""Routing replay: reuse expert choices that an earlier pass recorded or that the engine made.

A forward pre-hook stores the rows that a layer is called with before its router runs. This works
with several micro-batches in flight in a pipeline, and when a layer is recomputed.

    layer(packed_seq_params=rows) ── current rows ──▶ Replay.get_replay_topk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.attention import PackedRows
from slime.backends.megatron_utils.parallel import (
    all_gather,
    context_group,
    decoder_layers,
    tensor_group,
)
from slime.core.packing import join_slices
from slime.core.types import RolloutBatch, TrainBatch

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Replay:
    """Replace the top-k of one layer's router; `rows`, shared by all, are those of the latest layer call."""

    rows: PackedRows | None = None

    def __init__(self, layer: int, *, sequence_parallel: bool) -> None:
        self._layer = layer
        self._sequence_parallel = sequence_parallel

    def get_replay_topk(
        self,
        scores: torch.Tensor,  # [tokens of this rank, experts]
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None
        values, own = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        rows = Replay.rows
        if rows is None:
            return values, own
        chosen = own
        if rows.routed_experts is not None:
            wanted = self._sequence_shard(rows.routed_experts[:, self._layer]).long()
            chosen = torch.where(wanted >= 0, wanted, own)
            values = scores.gather(1, chosen)
        if rows.recorded is not None:
            rows.recorded[self._layer] = chosen.to(torch.int16)
        return values, chosen

    def _sequence_shard(self, experts: torch.Tensor) -> torch.Tensor:
        if not self._sequence_parallel:
            return experts
        group = tensor_group()
        return experts.chunk(group.size())[group.rank()]


def install_replay(chunks: Sequence[GPTModel]) -> None:
    for chunk in chunks:
        for layer in decoder_layers(chunk):
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                router.router_replay = Replay(
                    layer.layer_number - 1, sequence_parallel=chunk.config.sequence_parallel
                )
                layer.register_forward_pre_hook(_store_rows, with_kwargs=True)


def _store_rows(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the rows; a layer gets them whether slime or TransformerEngine computes attention."""
    Replay.rows = kwargs["packed_seq_params"]


def recorded_rows(rows: PackedRows, batch: TrainBatch, num_layers: int) -> list[np.ndarray]:
    """Return [tokens, layers, experts per token] of each row; -1 for layers of other stages."""
    assert rows.recorded is not None and rows.position_ids is not None
    length, some = len(rows.position_ids), next(iter(rows.recorded.values()), None)
    width = 1 if some is None else some.shape[1]
    shape = (length, num_layers, width)
    whole = torch.full(shape, -1, dtype=torch.int16, device=batch.tokens.device)
    for layer, experts in rows.recorded.items():
        whole[:, layer] = _over_tensor_ranks(experts, length)
    group = context_group()
    slices = all_gather(whole[: len(batch.tokens)].int(), group)  # gloo does not support int16
    column = join_slices(slices, batch).cpu().numpy().astype(np.int16)
    cp = group.size()
    starts = batch.cu_seqlens[:-1].tolist()
    lens = [p + r for p, r in zip(batch.prompt_lens, batch.response_lens, strict=True)]
    return [column[s * cp : s * cp + n].copy() for s, n in zip(starts, lens, strict=True)]


def keep_experts(
    batch: RolloutBatch, micro_batches: list[TrainBatch], seen: list[PackedRows], num_layers: int
) -> None:
    """Store the experts that the routers chose, to replay them in training on these rows.

    A dummy's choices count only for the row of a rank that has no row of its own.
    """
    kept: dict[int, np.ndarray] = {}
    for micro_batch, rows in zip(micro_batches, seen, strict=False):
        experts = recorded_rows(rows, micro_batch, num_layers)
        found = dict(zip(micro_batch.rows, experts, strict=True))
        kept = {**found, **kept} if micro_batch.dummy else {**kept, **found}
    batch.routed_experts = [kept[row] for row in range(len(batch.total_lens))]


def _over_tensor_ranks(experts: torch.Tensor, length: int) -> torch.Tensor:
    if len(experts) == length:
        return experts
    return torch.cat(all_gather(experts.int(), tensor_group()))
