"""Offsets of a micro-batch's packed samples on this rank, computed once and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.kernels.packed_attention import PackedLayout, packed_layout
from slime.core.packing import zigzag_index
from slime.core.types import ParallelInfo


@dataclass(frozen=True, kw_only=True)
class ContextSegments:
    """The keys that the queries of one context rank attend to, among those gathered of all ranks.

    Two samples of 4 tokens over two ranks, rank 0 holds tokens 0 and 3 of each::

        q_lens   = (1, 1, 1, 1)      two chunks of each sample
        k_lens   = (1, 4, 1, 4)      a chunk attends to its sample up to its own end
        kv_index                     indices of those keys among the gathered ones, 10 in all
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    kv_index: torch.Tensor  # [sum of k_lens]
    cu_q: torch.Tensor  # [segments + 1] int32
    cu_k: torch.Tensor


@dataclass
class PackedRows(PackedSeqParams):
    """PackedSeqParams of megatron's layers, with the fields of `PackedAttention` and `Replay`."""

    layout: PackedLayout | None = None  # without context parallelism
    segments: ContextSegments | None = None  # with it
    position_ids: torch.Tensor | None = None  # [T], for RoPE looked up per token
    routed_experts: torch.Tensor | None = None  # [T, layers, experts per token], to replay
    recorded: dict[int, torch.Tensor] | None = None  # experts chosen, by layer


def packed_rows(lens: list[int], parallel: ParallelInfo, device: torch.device) -> PackedRows:
    """Return the rows of samples whose padded lengths over all context ranks are `lens`."""
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0).to(device=device, dtype=torch.int32)
    layout = segments = None
    if parallel.cp_size == 1:
        layout = packed_layout(lens, device)
    else:
        segments = context_segments(np.array(lens), parallel, device)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lens),
        max_seqlen_kv=max(lens),
        layout=layout,
        segments=segments,
    )


def context_segments(
    lens: np.ndarray, parallel: ParallelInfo, device: torch.device
) -> ContextSegments:
    rank, size = parallel.cp_rank, parallel.cp_size
    gathered = np.concatenate([zigzag_index(lens, r, size) for r in range(size)])
    place = np.empty_like(gathered)  # index of each token of the full column among the gathered
    place[gathered] = np.arange(len(gathered))
    q_lens, k_lens, index = [], [], []
    for start, length in zip(np.cumsum(lens) - lens, lens, strict=True):
        chunk = length // (2 * size)
        for end in (chunk * (rank + 1), chunk * (2 * size - rank)):
            q_lens.append(int(chunk))
            k_lens.append(int(end))
            index.append(place[start : start + end])
    return ContextSegments(
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        kv_index=torch.from_numpy(np.concatenate(index)).to(device),
        cu_q=_offsets(q_lens, device),
        cu_k=_offsets(k_lens, device),
    )


def _offsets(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(device=device, dtype=torch.int32)
