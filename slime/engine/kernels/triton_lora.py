"""Adapters of a forward in two Triton kernels: A(x) in split-K partial sums, then scale * B of their sum.

A program computes a tile of tokens. It reads the matrices of every slot that one of its tokens has, and
masks the other tokens: with one adapter in the batch each matrix is read once per tile. The number of slots
and their rank are fixed, so one CUDA graph serves any mix. Tokens without an adapter are not written.

    x ─ shrink ─▶ low [splits, T, parts * rank] fp32 ─┬─ expand ─▶ added to the output of the linears
                                                      └─ expand_silu_mul ─▶ silu(gate) * up

Gate and up are added in registers of the activation, so that their sum is never written.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slime.engine.kernels.interface import AdapterRows, LoraWeights
from slime.engine.kernels.triton_launch import (
    dot_precision,
    pdl_options,
    pdl_wait,
    shared_memory,
)

_FEW_TOKENS, _DECODE_TOKENS = 64, 256
_MOST_SPLITS = 16
_MOST_PARTS = 4  # linears that share an input: four of a gated delta net
_PROGRAMS = 132  # SMs of an H200
_MOST_STAGES = 6
_COLUMNS = 128  # of a tile of the output
# Every tile of the output sums all partial sums of its tokens again: beyond these bytes, all programs
# together, reading them takes longer than a split of the depth saves.
_MOST_LOW_BYTES = 12 << 20


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> None:
    """Add scale * B(A(x)) to `out` [T, out], or to the first of split-K partial sums [P, T, out]."""
    tiles = choose_tiles(x, weights)
    low = _shrink(x, weights, rows, tiles)
    parts = len(weights.widths)
    assert parts <= _MOST_PARTS, "a launch has the widths of so many linears"
    expand_kernel[(tiles.columns, tiles.rows)](
        *(low, weights.b, weights.scales, rows.slots, out, len(x)),
        *(*weights.widths, *[0] * (_MOST_PARTS - parts)),
        PARTS=parts,
        SPLITS=tiles.splits,
        BLOCK_N=_COLUMNS,
        num_warps=4,
        **_options(x, weights, tiles),
    )


def silu_mul_lora(
    gate_up: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows
) -> torch.Tensor:
    """Return silu(gate) * up [T, F] of gate_up [T, 2 F] plus the adapters of x; `gate_up` is not written.

    Sums are rounded to the dtype of gate_up before the activation, as if they had been written.
    """
    tiles = choose_tiles(x, weights)
    low = _shrink(x, weights, rows, tiles)
    width = weights.widths[0]
    out = gate_up.new_empty(len(x), width)
    expand_silu_mul_kernel[(triton.cdiv(width, _COLUMNS), tiles.rows)](
        *(low, weights.b, weights.scales, rows.slots, gate_up, out, len(x), width),
        SPLITS=tiles.splits,
        BLOCK_N=_COLUMNS,
        num_warps=8 if tiles.block_m > 16 else 4,  # registers of two tiles
        **_options(x, weights, tiles),
    )
    return out


@dataclass(frozen=True, kw_only=True)
class LoraTiles:
    """How a launch is cut: tiles of the tokens and of the output's columns, splits of the depth."""

    rows: int
    columns: int
    block_m: int
    block_k: int
    splits: int
    split_depth: int


def choose_tiles(x: torch.Tensor, weights: LoraWeights) -> LoraTiles:
    """Return tiles that give every SM work in both kernels.

    Splits are powers of two, since every number of them is one more kernel to compile.
    """
    tokens, depth = x.shape
    block_m = 16 if tokens <= _FEW_TOKENS else 32 if tokens <= _DECODE_TOKENS else 64
    block_k = 64 if x.element_size() == 2 else 32
    rows = triton.cdiv(tokens, block_m)
    columns = sum(triton.cdiv(width, _COLUMNS) for width in weights.widths)
    wanted = triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows * len(weights.widths)))
    low_bytes = rows * columns * block_m * weights.b.shape[2] * 4
    splits = min(_MOST_SPLITS, wanted)
    while splits > 1 and (splits * low_bytes > _MOST_LOW_BYTES or 2 * splits * block_k > depth):
        splits //= 2
    split_depth = triton.cdiv(triton.cdiv(depth, splits), block_k) * block_k
    return LoraTiles(
        rows=rows,
        columns=columns,
        block_m=block_m,
        block_k=block_k,
        splits=splits,
        split_depth=split_depth,
    )


def _shrink(
    x: torch.Tensor, weights: LoraWeights, rows: AdapterRows, tiles: LoraTiles
) -> torch.Tensor:
    """Return the partial sums of A(x), [splits, T, parts * rank]; those of tokens without adapter are garbage."""
    (tokens, depth), parts, rank = x.shape, len(weights.widths), weights.b.shape[2]
    low = x.new_empty(tiles.splits, tokens, parts * rank, dtype=torch.float32)
    options = _options(x, weights, tiles)
    stage = (tiles.block_m + options["RANK_BLOCK"]) * tiles.block_k * x.element_size()  # bytes
    stages = shared_memory() // 2 // stage  # two programs fit into an SM
    # The parts of a tile are neighbours: they read the same tokens.
    shrink_kernel[(parts, tiles.rows, tiles.splits)](
        *(x, weights.a, rows.slots, low, tokens, depth, tiles.split_depth),
        PARTS=parts,
        BLOCK_K=tiles.block_k,
        num_warps=4,
        num_stages=max(2, min(stages, _MOST_STAGES)),
        **options,
    )
    return low


def _options(x: torch.Tensor, weights: LoraWeights, tiles: LoraTiles) -> dict:
    rank = weights.b.shape[2]
    return {
        "SLOTS": weights.a.shape[0],
        "RANK": rank,
        "RANK_BLOCK": max(16, triton.next_power_of_2(rank)),
        "BLOCK_M": tiles.block_m,
        "PRECISION": dot_precision(x),
        **pdl_options(),
    }


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
    part = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    low = tl.arange(0, RANK_BLOCK)
    k = split * split_depth + tl.arange(0, BLOCK_K)
    if PDL:
        pdl_wait()
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    source = x + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * depth
    total = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    first, last = slots_of_tile(slot, SLOTS)
    for index in range(first, last):
        mine = slot == index
        if SLOTS == 1 or tl.max(mine.to(tl.int32), 0) > 0:
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
    width_3,
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
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # The tiles of all parts stand side by side; a part that does not exist has none.
    tile = tl.program_id(0)
    second = tl.cdiv(width_0, BLOCK_N)
    third = second + tl.cdiv(width_1, BLOCK_N)
    fourth = third + tl.cdiv(width_2, BLOCK_N)
    part = (tile >= second).to(tl.int32) + (tile >= third) + (tile >= fourth)
    width = tl.where(part == 0, width_0, tl.where(part == 1, width_1, width_2))
    width = tl.where(part == 3, width_3, width)
    first = tl.where(part > 0, width_0, 0) + tl.where(part > 1, width_1, 0)
    first += tl.where(part > 2, width_2, 0)
    tile -= tl.where(part == 0, 0, tl.where(part == 1, second, tl.where(part == 2, third, fourth)))
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    columns = width_0 + width_1 + width_2 + width_3
    matrix = b + (first + column).to(tl.int64)[None, :] * RANK
    if SLOTS == 1:  # matrices do not change while kernels run: they are loaded before the wait
        right = load_b(matrix, inside, RANK, RANK_BLOCK)
    if PDL:
        pdl_wait()
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    left = sum_low(low, scales, slot, row, rows, part, PARTS, RANK, RANK_BLOCK, BLOCK_M, SPLITS)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SLOTS == 1:
        total = tl.dot(left.to(right.dtype), right, total, input_precision=PRECISION)
    else:
        start, end = slots_of_tile(slot, SLOTS)
        for index in range(start, end):
            mine = slot == index
            if tl.max(mine.to(tl.int32), 0) > 0:
                skipped = (index * columns).to(tl.int64) * RANK
                right = load_b(matrix + skipped, inside, RANK, RANK_BLOCK)
                chosen = tl.where(mine[:, None], left, 0.0).to(right.dtype)
                total = tl.dot(chosen, right, total, input_precision=PRECISION)
    target = out + row.to(tl.int64)[:, None] * columns + (first + column)[None, :]
    written = (slot >= 0)[:, None] & inside[None, :]
    before = tl.load(target, mask=written, other=0.0)
    tl.store(target, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["rows"])
def expand_silu_mul_kernel(
    low,  # [SPLITS, rows, 2 * RANK] float32
    b,  # [SLOTS, 2 * width, RANK], gate above up
    scales,  # [SLOTS] float32
    slots,  # [rows] int32
    gate_up,  # [rows, 2 * width]
    out,  # [rows, width]
    rows,
    width,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    matrix = b + column.to(tl.int64)[None, :] * RANK
    below = width.to(tl.int64) * RANK  # from the rows of gate to those of up
    if SLOTS == 1:
        gate_b = load_b(matrix, inside, RANK, RANK_BLOCK)
        up_b = load_b(matrix + below, inside, RANK, RANK_BLOCK)
    if PDL:
        pdl_wait()
    real = (row < rows)[:, None] & inside[None, :]
    source = gate_up + row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
    gate = tl.load(source, mask=real, other=0.0)
    up = tl.load(source + width, mask=real, other=0.0)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    gate_low = sum_low(low, scales, slot, row, rows, 0, 2, RANK, RANK_BLOCK, BLOCK_M, SPLITS)
    up_low = sum_low(low, scales, slot, row, rows, 1, 2, RANK, RANK_BLOCK, BLOCK_M, SPLITS)
    gate_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SLOTS == 1:
        gate_sum = tl.dot(gate_low.to(gate_b.dtype), gate_b, gate_sum, input_precision=PRECISION)
        up_sum = tl.dot(up_low.to(up_b.dtype), up_b, up_sum, input_precision=PRECISION)
    else:
        start, end = slots_of_tile(slot, SLOTS)
        for index in range(start, end):
            mine = slot == index
            if tl.max(mine.to(tl.int32), 0) > 0:
                skipped = index * 2 * below
                gate_b = load_b(matrix + skipped, inside, RANK, RANK_BLOCK)
                chosen = tl.where(mine[:, None], gate_low, 0.0).to(gate_b.dtype)
                gate_sum = tl.dot(chosen, gate_b, gate_sum, input_precision=PRECISION)
                up_b = load_b(matrix + skipped + below, inside, RANK, RANK_BLOCK)
                chosen = tl.where(mine[:, None], up_low, 0.0).to(up_b.dtype)
                up_sum = tl.dot(chosen, up_b, up_sum, input_precision=PRECISION)
    kind = out.dtype.element_ty  # rounded where separate operations round
    has = (slot >= 0)[:, None]
    gate = tl.where(has, (gate.to(tl.float32) + gate_sum).to(kind), gate).to(tl.float32)
    up = tl.where(has, (up.to(tl.float32) + up_sum).to(kind), up).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, (active * up).to(kind), mask=real)


@triton.jit
def slots_of_tile(slot, SLOTS: tl.constexpr):
    """Return the first slot that a token of the tile has, and one more than the last; SLOTS and 0 of none.

    A single slot is not looked for.
    """
    if SLOTS == 1:
        return 0, 1
    return tl.min(tl.where(slot >= 0, slot, SLOTS), 0), tl.max(slot, 0) + 1


@triton.jit
def load_b(matrix, inside, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Return the tile of B below the addresses `matrix` [1, columns], [RANK_BLOCK, columns]."""
    depth = tl.arange(0, RANK_BLOCK)
    kept = (depth < RANK)[:, None] & inside[None, :]
    return tl.load(matrix + depth[:, None], mask=kept, other=0.0)


@triton.jit
def sum_low(
    low,
    scales,
    slot,
    row,
    rows,
    part,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return scale * A(x) of one part, [BLOCK_M, RANK_BLOCK]; 0 of tokens without an adapter."""
    depth = tl.arange(0, RANK_BLOCK)
    has = slot >= 0
    kept = has[:, None] & (depth < RANK)[None, :]
    total = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled: all loads are under way at once
        at = ((split * rows + row).to(tl.int64) * PARTS + part)[:, None] * RANK + depth[None, :]
        total += tl.load(low + at, mask=kept, other=0.0)
    return total * tl.load(scales + tl.where(has, slot, 0), mask=has, other=0.0)[:, None]
