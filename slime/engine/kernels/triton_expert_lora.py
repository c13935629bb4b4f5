"""Adapters of MoE experts in Triton, inside the grouped matmuls of triton_experts.py.

`shrink_kernel` computes scale * A(x) of every pair whose token has an adapter, with the matrix of its slot and
expert; the two grouped matmuls then add B times that with `expand`.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slime.engine.kernels.interface import ExpertLora
from slime.engine.kernels.triton_launch import dot_precision


@dataclass(frozen=True)
class Pairs:
    """The pairs of every expert, and the adapter slot of every token."""

    lists: torch.Tensor
    counts: torch.Tensor
    tokens: int
    top: int
    slots: torch.Tensor | None


def shrink(
    x: torch.Tensor, lora: ExpertLora | None, pairs: Pairs, per_row: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """Return what a grouped matmul needs to add adapters: scale * A(x) of each pair, B, and slots.

    Rows of `x` are tokens with `per_row` pairs each, or pairs. Without adapters the tensors are placeholders.
    """
    if lora is None or pairs.slots is None:
        return (x, x, x), {"SLOTS": 0, "RANK": 1, "RANK_BLOCK": 16}
    num_slots, num, rank, depth = lora.a.shape
    flags = {
        "SLOTS": num_slots,
        "RANK": rank,
        "RANK_BLOCK": max(16, triton.next_power_of_2(rank)),
    }
    low = x.new_empty(pairs.tokens * pairs.top, rank, dtype=torch.float32)
    shrink_kernel[(num,)](
        *(x, lora.a, lora.scales, pairs.slots, pairs.lists, pairs.counts, low, pairs.tokens),
        **flags,
        NUM=num,
        DEPTH=depth,
        TOP=pairs.top,
        PER_ROW=per_row,
        BLOCK_M=16,
        BLOCK_K=64,
        PRECISION=dot_precision(x),
        num_warps=4,
    )
    return (low, lora.b, pairs.slots), flags


@triton.jit
def shrink_kernel(
    x,  # [T, DEPTH] or, with PER_ROW 1, [T * TOP, DEPTH]
    a,  # [SLOTS, NUM, RANK, DEPTH]
    scales,  # [SLOTS] float32
    slots,  # [T] int32
    lists,
    counts,
    out,  # [T * TOP, RANK] float32
    capacity,
    NUM: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, TOP: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute scale * A(x) of the pairs of one expert that have an adapter."""
    expert = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + expert)
    low = tl.arange(0, RANK_BLOCK)
    depth = tl.arange(0, BLOCK_K)
    for first in range(0, count, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        pair = tl.load(lists + expert * capacity + row, mask=row < count, other=0).to(tl.int64)
        slot = tl.load(slots + pair // TOP, mask=row < count, other=-1)
        source = x + (pair // PER_ROW)[:, None] * DEPTH
        total = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
        for index in range(SLOTS):
            mine = slot == index
            if tl.max(mine.to(tl.int32), 0) > 0:
                matrix = a + ((index * NUM + expert) * RANK + low)[None, :] * DEPTH
                for start in range(0, DEPTH, BLOCK_K):
                    k = start + depth
                    left = tl.load(
                        source + k[None, :], mask=mine[:, None] & (k < DEPTH)[None, :], other=0.0
                    )
                    right = tl.load(
                        matrix + k[:, None],
                        mask=(k < DEPTH)[:, None] & (low < RANK)[None, :],
                        other=0.0,
                    )
                    total = tl.dot(left, right, total, input_precision=PRECISION)
        has = slot >= 0
        scale = tl.load(scales + tl.where(has, slot, 0), mask=has, other=0.0)
        target = out + pair[:, None] * RANK + low[None, :]
        tl.store(target, total * scale[:, None], mask=has[:, None] & (low < RANK)[None, :])


@triton.jit
def expand(
    total,  # [BLOCK_M, BLOCK_N] float32
    low,  # [T * TOP, RANK] float32
    matrices,  # [SLOTS, experts, columns, RANK], at the first column of this tile
    pair,
    slot,
    inside,
    stride,  # elements of all experts of a slot
    SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add B times the low-rank rows to `total`, for the pairs that have an adapter."""
    depth = tl.arange(0, RANK_BLOCK)
    kept = (slot >= 0)[:, None] & (depth < RANK)[None, :]
    left = tl.load(low + pair[:, None] * RANK + depth[None, :], mask=kept, other=0.0)
    for index in range(SLOTS):
        mine = slot == index
        if tl.max(mine.to(tl.int32), 0) > 0:
            right = tl.load(
                matrices + index * stride + depth[:, None],
                mask=(depth < RANK)[:, None] & inside[None, :],
                other=0.0,
            )
            chosen = tl.where(mine[:, None], left, 0.0).to(right.dtype)
            total = tl.dot(chosen, right, total, input_precision=PRECISION)
    return total
