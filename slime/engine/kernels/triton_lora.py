"""LoRA in Triton: A(x), fused into the base's matmul or in its own kernel, then scale * B times that.

    x ─ matmul with the base's weight above A of all slots ─▶ base's output | A(x) ─┬─ expand ─▶ their sum
    x ─ matmul with the base's weight ─▶ base's output ─────┬───────────────────────┘
    x ─ shrink ─▶ low [splits, T, parts * rank] fp32 ───────┴─ expand, or expand_silu_mul ─▶ silu(gate) * up

The first way saves a launch and a read of x; it is used if A has few rows compared with the base
(`LoraBank.rows_below`). A program computes a tile of tokens. It reads the matrices of every slot in its tile and
masks the other tokens: with one adapter in the batch each matrix is read once per tile. The number of slots
and their rank are fixed, so one CUDA graph serves any mix. Gate and up are added in the registers of the
activation kernel, so that their sum is never written.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from slime.engine.kernels import triton_matmuls
from slime.engine.kernels.interface import AdapterRows, LoraWeights
from slime.engine.kernels.triton_launch import dot_precision, pdl_options, pdl_wait, shared_memory

_FEW_TOKENS, _DECODE_TOKENS = 64, 256
_MAX_SPLITS = 16
_MAX_PARTS = 4  # linears that share an input: four of a gated delta net
_PROGRAMS = 132  # SMs of an H200
_MAX_STAGES = 6
_COLUMNS = 128  # of a tile of the output
# Every output tile reads all partial sums of its tokens: above this total, the reads cost more than split-K
# saves.
_MAX_LOW_BYTES = 12 << 20


def linear_lora(x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> torch.Tensor:
    """Return base plus adapters of x by one matmul and one kernel, for A stored below the base's weight."""
    assert weights.joined is not None
    sums = triton_matmuls.linear_split_k(x, *weights.joined)
    out = x.new_empty(len(x), sum(weights.widths))
    _expand(sums, out, _low_below(sums, x, weights), weights, rows)
    return out


def gated_linear_lora(x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> torch.Tensor:
    """Like `linear_lora`, followed by the activation: silu(gate) * up."""
    assert weights.joined is not None
    sums = triton_matmuls.linear(x, *weights.joined)
    return _expand_silu_mul(sums, _low_below(sums, x, weights), weights, rows)


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> None:
    """Add scale * B(A(x)) to `out` [T, out], or to the first of split-K partial sums [P, T, out]."""
    first = out if out.ndim == 2 else out[0]
    _expand(first, first, _shrink(x, weights, rows), weights, rows)


def silu_mul_lora(
    gate_up: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows
) -> torch.Tensor:
    """Return silu(gate) * up [T, F] of gate_up [T, 2 F] plus the adapters of x; `gate_up` is not written.

    Sums are rounded to the dtype of gate_up before the activation, as if they had been written.
    """
    return _expand_silu_mul(gate_up, _shrink(x, weights, rows), weights, rows)


@dataclass(frozen=True, kw_only=True)
class _Low:
    """A(x) as partial sums; rows of tokens without an adapter are undefined.

    `sums` is [splits, T, row_stride]; the parts * rank values of a token start at its slot * `slot_stride`.
    """

    sums: torch.Tensor
    splits: int
    row_stride: int
    slot_stride: int
    tiles: LoraTiles


def _low_below(sums: torch.Tensor, x: torch.Tensor, weights: LoraWeights) -> _Low:
    """Return the columns after those of the base, which hold A(x) of all slots."""
    splits, tiles = sums.shape[0] if sums.ndim == 3 else 1, choose_tiles(x, weights)
    low, width = sums[..., sum(weights.widths) :], weights.a.shape[1]  # of one slot
    return _Low(sums=low, splits=splits, row_stride=sums.shape[-1], slot_stride=width, tiles=tiles)


def _expand(
    source: torch.Tensor,  # [T, columns] or partial sums [P, T, columns]: base columns first
    out: torch.Tensor,  # [T, out], may be `source`
    low: _Low,
    weights: LoraWeights,
    rows: AdapterRows,
) -> None:
    parts = len(weights.widths)
    assert parts <= _MAX_PARTS
    expand_kernel[(low.tiles.columns, low.tiles.rows)](
        *(low.sums, weights.b, weights.scales, rows.slots, source, out),
        *(out.shape[0], low.row_stride, low.slot_stride, source.shape[-1]),
        *(*weights.widths, *[0] * (_MAX_PARTS - parts)),
        PARTS=parts,
        SPLITS=low.splits,
        SUMS=source.shape[0] if source.ndim == 3 else 1,
        IN_PLACE=source is out,
        BLOCK_N=_COLUMNS,
        num_warps=4,
        **_options(weights, low.tiles),
    )


def _expand_silu_mul(
    gate_up: torch.Tensor, low: _Low, weights: LoraWeights, rows: AdapterRows
) -> torch.Tensor:
    tokens, width = len(gate_up), weights.widths[0]
    out = gate_up.new_empty(tokens, width)
    expand_silu_mul_kernel[(triton.cdiv(width, _COLUMNS), low.tiles.rows)](
        *(low.sums, weights.b, weights.scales, rows.slots, gate_up, out),
        *(tokens, low.row_stride, low.slot_stride, gate_up.shape[1], width),
        SPLITS=low.splits,
        BLOCK_N=_COLUMNS,
        num_warps=8 if low.tiles.block_m > 16 else 4,  # registers of two tiles
        **_options(weights, low.tiles),
    )
    return out


@dataclass(frozen=True, kw_only=True)
class LoraTiles:
    """Tiling of a launch: tiles of tokens and output columns, split-K of the depth."""

    rows: int
    columns: int
    block_m: int
    block_k: int
    splits: int
    split_depth: int


def choose_tiles(x: torch.Tensor, weights: LoraWeights) -> LoraTiles:
    """Return tiles that give every SM work in both kernels.

    Splits are powers of two, since each value compiles another kernel.
    """
    tokens, depth = x.shape
    block_m = 16 if tokens <= _FEW_TOKENS else 32 if tokens <= _DECODE_TOKENS else 64
    block_k = 64 if x.element_size() == 2 else 32
    rows = triton.cdiv(tokens, block_m)
    columns = sum(triton.cdiv(width, _COLUMNS) for width in weights.widths)
    wanted = triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows * len(weights.widths)))
    low_bytes = rows * columns * block_m * weights.b.shape[2] * 4
    splits = min(_MAX_SPLITS, wanted)
    while splits > 1 and (splits * low_bytes > _MAX_LOW_BYTES or 2 * splits * block_k > depth):
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


def _shrink(x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> _Low:
    """Compute A(x) in its own kernel."""
    tiles = choose_tiles(x, weights)
    (tokens, depth), parts, rank = x.shape, len(weights.widths), weights.b.shape[2]
    low = x.new_empty(tiles.splits, tokens, parts * rank, dtype=torch.float32)
    options = _options(weights, tiles)
    stage = (tiles.block_m + options["RANK_BLOCK"]) * tiles.block_k * x.element_size()  # bytes
    stages = shared_memory() // 2 // stage  # two programs fit into an SM
    # The parts of a tile are adjacent programs: they read the same tokens.
    shrink_kernel[(parts, tiles.rows, tiles.splits)](
        *(x, weights.a, rows.slots, low, tokens, depth, tiles.split_depth),
        PARTS=parts,
        BLOCK_K=tiles.block_k,
        num_warps=4,
        num_stages=max(2, min(stages, _MAX_STAGES)),
        **options,
    )
    return _Low(sums=low, splits=tiles.splits, row_stride=parts * rank, slot_stride=0, tiles=tiles)


def _options(weights: LoraWeights, tiles: LoraTiles) -> dict:
    rank = weights.b.shape[2]
    return {
        "SLOTS": weights.a.shape[0],
        "RANK": rank,
        "RANK_BLOCK": max(16, triton.next_power_of_2(rank)),
        "BLOCK_M": tiles.block_m,
        "PRECISION": dot_precision(weights.b),
        **pdl_options(),
    }


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    x,  # [rows, depth]
    a,  # [SLOTS, PARTS * RANK, depth]
    slots,  # [rows] int32
    out,  # [splits, rows, PARTS * RANK] float32
    rows, depth, split_depth,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    low,  # [SPLITS, rows, low_stride], those of a token at slot_stride times its slot
    b,  # [SLOTS, columns of all parts, RANK]
    scales,  # [SLOTS] float32
    slots,  # [rows] int32
    source,  # [SUMS, rows, source_stride], columns of all parts first
    out,  # [rows, columns of all parts]
    rows, low_stride, slot_stride, source_stride, width_0, width_1, width_2, width_3,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SUMS: tl.constexpr,
    IN_PLACE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Program 0 counts the tiles of all parts in order; a part that does not exist has none.
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
    if SLOTS == 1:  # weights do not change while kernels run: load them before the wait
        right = load_b(matrix, inside, RANK, RANK_BLOCK)
    if PDL:
        pdl_wait()
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    real = (row < rows)[:, None] & inside[None, :]
    if IN_PLACE:  # rows without an adapter are neither read nor written
        real = real & (slot >= 0)[:, None]
    before = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for one in tl.static_range(SUMS):
        at = (one * rows + row).to(tl.int64)[:, None] * source_stride + (first + column)[None, :]
        before += tl.load(source + at, mask=real, other=0.0).to(tl.float32)
    begin = low + low_part(slot, slot_stride, part, RANK)
    left = sum_low(begin, scales, slot, row, rows, low_stride, RANK, RANK_BLOCK, BLOCK_M, SPLITS)
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
    total = tl.where((slot >= 0)[:, None], before + total, before)
    tl.store(target, total.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def expand_silu_mul_kernel(
    low,  # [SPLITS, rows, low_stride], those of a token at slot_stride times its slot
    b,  # [SLOTS, 2 * width, RANK], gate above up
    scales,  # [SLOTS] float32
    slots,  # [rows] int32
    gate_up,  # [rows, source_stride], gate and up first
    out,  # [rows, width]
    rows, low_stride, slot_stride, source_stride, width,
    SLOTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    matrix = b + column.to(tl.int64)[None, :] * RANK
    below = width.to(tl.int64) * RANK  # offset from gate's rows to up's
    if SLOTS == 1:
        gate_b = load_b(matrix, inside, RANK, RANK_BLOCK)
        up_b = load_b(matrix + below, inside, RANK, RANK_BLOCK)
    if PDL:
        pdl_wait()
    real = (row < rows)[:, None] & inside[None, :]
    source = gate_up + row.to(tl.int64)[:, None] * source_stride + column[None, :]
    gate = tl.load(source, mask=real, other=0.0)
    up = tl.load(source + width, mask=real, other=0.0)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    begin = low + low_part(slot, slot_stride, 0, RANK)
    gate_low = sum_low(
        begin, scales, slot, row, rows, low_stride, RANK, RANK_BLOCK, BLOCK_M, SPLITS
    )
    begin = low + low_part(slot, slot_stride, 1, RANK)
    up_low = sum_low(begin, scales, slot, row, rows, low_stride, RANK, RANK_BLOCK, BLOCK_M, SPLITS)
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
    """Return the range of slots that occur in the tile; SLOTS, 0 if none. A single slot is not searched for."""
    if SLOTS == 1:
        return 0, 1
    return tl.min(tl.where(slot >= 0, slot, SLOTS), 0), tl.max(slot, 0) + 1


@triton.jit
def load_b(matrix, inside, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Load the tile of B, [RANK_BLOCK, columns], whose columns start at the addresses `matrix`."""
    depth = tl.arange(0, RANK_BLOCK)
    kept = (depth < RANK)[:, None] & inside[None, :]
    return tl.load(matrix + depth[:, None], mask=kept, other=0.0)


@triton.jit
def low_part(slot, slot_stride, part, RANK: tl.constexpr):
    """Return the offset of a part's A(x) in the row of each token, [BLOCK_M]."""
    return tl.where(slot >= 0, slot, 0) * slot_stride + part * RANK


@triton.jit
def sum_low(
    begin,  # [BLOCK_M] addresses in row 0
    scales, slot, row, rows, low_stride,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return scale * A(x) of one part, [BLOCK_M, RANK_BLOCK]; 0 of tokens without an adapter."""
    depth = tl.arange(0, RANK_BLOCK)
    has = slot >= 0
    kept = has[:, None] & (depth < RANK)[None, :]
    total = tl.zeros([BLOCK_M, RANK_BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled, so that all loads are in flight together
        at = begin + (split * rows + row).to(tl.int64) * low_stride
        total += tl.load(at[:, None] + depth[None, :], mask=kept, other=0.0).to(tl.float32)
    return total * tl.load(scales + tl.where(has, slot, 0), mask=has, other=0.0)[:, None]
