"""Adapters of a forward in two Triton kernels: A(x) in split-K partial sums, then scale * B of their sum.

A program computes a tile of tokens. It reads the matrices of every slot that one of its tokens has, and
masks the other tokens: with one adapter in the batch each matrix is read once per tile. The number of slots
and their rank are fixed, so one CUDA graph serves any mix. Tokens without an adapter are not written.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.engine.kernels.interface import AdapterRows, LoraWeights
from slime.engine.kernels.triton_launch import dot_precision, pdl_options, pdl_wait

_FEW_TOKENS = 64
_MOST_SPLITS = 8
_PROGRAMS = 132  # SMs of an H200


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> None:
    """Add scale * B(A(x)) to `out` [T, out], or to the first of split-K partial sums [P, T, out]."""
    tokens, depth = x.shape
    parts, rank = len(weights.widths), weights.b.shape[2]
    step = 64 if x.element_size() == 2 else 32
    block_m = 16 if tokens <= _FEW_TOKENS else 64
    tiles = triton.cdiv(tokens, block_m)
    splits = choose_splits(tiles * parts, depth, step)
    shape = {
        "PARTS": parts,
        "SLOTS": weights.a.shape[0],
        "RANK": rank,
        "RANK_BLOCK": max(16, triton.next_power_of_2(rank)),
        "BLOCK_M": block_m,
        "PRECISION": dot_precision(x),
        "num_warps": 4,
        **pdl_options(),
    }
    low = x.new_empty(splits, tokens, parts * rank, dtype=torch.float32)
    split_depth = triton.cdiv(triton.cdiv(depth, splits), step) * step
    shrink_kernel[(tiles, parts, splits)](
        *(x, weights.a, rows.slots, low, tokens, depth, split_depth), BLOCK_K=step, **shape
    )
    widths = (*weights.widths, 0, 0)[:3]
    block_n = 64
    expand_kernel[(tiles, parts, triton.cdiv(max(widths), block_n))](
        *(low, weights.b, weights.scales, rows.slots, out, tokens, *widths),
        SPLITS=splits,
        BLOCK_N=block_n,
        **shape,
    )


def choose_splits(programs: int, depth: int, step: int) -> int:
    """Return over how many programs the input columns are split: more for few tokens."""
    wanted = min(_MOST_SPLITS, -(-_PROGRAMS // programs), -(-depth // (2 * step)))
    return max(wanted, 1)


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x,  # [rows, depth]
    a,  # [SLOTS, PARTS * RANK, depth]
    slots,  # [rows] int32
    out,  # [splits, rows, PARTS * RANK] float32
    rows,
    depth,
    split_depth,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    split = tl.program_id(2)
    low = tl.arange(0, RANK_BLOCK)
    k = split * split_depth + tl.arange(0, BLOCK_K)
    if PDL:
        pdl_wait()
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    source = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * depth
    total = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    for index in range(SLOTS):
        mine = slot == index
        if tl.max(mine.to(tl.int32), 0) > 0:
            matrix = a + ((index * PARTS + part) * RANK + low).to(tl.int64)[None, :] * depth
            for start in range(0, split_depth, BLOCK_K):
                inside = start + k < depth
                left = tl.load(
                    source + (start + k)[None, :], mask=mine[:, None] & inside[None, :], other=0.0
                )
                right = tl.load(
                    matrix + (start + k)[:, None],
                    mask=inside[:, None] & (low < RANK)[None, :],
                    other=0.0,
                )
                total = tl.dot(left, right, total, input_precision=PRECISION)
    at = ((split * rows + row).to(tl.int64) * PARTS + part)[:, None] * RANK + low[None, :]
    tl.store(out + at, total, mask=(slot >= 0)[:, None] & (low < RANK)[None, :])


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    low,  # [SPLITS, rows, PARTS * RANK] float32
    b,  # [SLOTS, columns of all parts, RANK]
    scales,  # [SLOTS] float32
    slots,  # [rows] int32
    out,  # [rows, columns of all parts]
    rows,
    width_0,
    width_1,
    width_2,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    columns = width_0 + width_1 + width_2
    width = tl.where(part == 0, width_0, tl.where(part == 1, width_1, width_2))
    first = tl.where(part == 0, 0, tl.where(part == 1, width_0, width_0 + width_1))
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    depth = tl.arange(0, RANK_BLOCK)
    if PDL:
        pdl_wait()
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    has = slot >= 0
    kept = has[:, None] & (depth < RANK)[None, :]
    left = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    for split in range(SPLITS):
        at = ((split * rows + row).to(tl.int64) * PARTS + part)[:, None] * RANK + depth[None, :]
        left += tl.load(low + at, mask=kept, other=0.0)
    left = left * tl.load(scales + tl.where(has, slot, 0), mask=has, other=0.0)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(SLOTS):
        mine = slot == index
        if tl.max(mine.to(tl.int32), 0) > 0:
            matrix = b + (index * columns + first + column).to(tl.int64)[None, :] * RANK
            right = tl.load(
                matrix + depth[:, None], mask=(depth < RANK)[:, None] & inside[None, :], other=0.0
            )
            chosen = tl.where(mine[:, None], left, 0.0).to(right.dtype)
            total = tl.dot(chosen, right, total, input_precision=PRECISION)
    target = out + row.to(tl.int64)[:, None] * columns + (first + column)[None, :]
    written = has[:, None] & inside[None, :]
    before = tl.load(target, mask=written, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=written)
