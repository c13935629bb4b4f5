"""Matmuls on a GPU: a split-K kernel for the few rows of a decoding step, cuBLAS for all others.

Decoding is bound by the bandwidth of reading the weight. A program computes one tile of the output over one
split of K. With PDL its part of the weight is prefetched into L2 before the preceding kernel has finished;
the partial sums are added up by the RMSNorm that follows.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import asdict

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import (
    TileSizes,
    pdl_options,
    pdl_wait,
    prefetch_l2,
    shared_memory,
)

_MAX_ROWS = 256
_FEW_ROWS = 64
_ROWS = 64  # of a tile, even for fewer rows: the M dimension of a tensor core instruction
_MAX_BYTES = 12 << 20  # of a weight: for larger ones cuBLAS keeps every SM busy


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    tiles = None if bias is not None else choose_tiles(x, weight)
    if tiles is None:
        return F.linear(x, weight, bias)
    return matmul(x, weight, tiles)[0]


def linear_split_k(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return [rows, columns], or split-K partial sums [splits, rows, columns] in float32."""
    tiles = None if bias is not None else choose_tiles(x, weight, most_rows=_MAX_ROWS)
    if tiles is None:
        return F.linear(x, weight, bias)
    return matmul(x, weight, tiles, splits=choose_split_k(*x.shape, tiles.BLOCK_K))


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return silu(gate) * up for weight [gate | up, depth], or None if cuBLAS should run it."""
    tiles = choose_tiles(x, weight, gated=True)
    return None if tiles is None else matmul(x, weight, tiles, gated=True)[0]


def matmul(
    x: torch.Tensor, weight: torch.Tensor, tiles: TileSizes, *, splits: int = 1, gated: bool = False
) -> torch.Tensor:
    """Return [splits, rows, columns]: with split-K, partial sums in float32."""
    rows, depth = x.shape
    columns = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(splits, rows, columns, dtype=x.dtype if splits == 1 else torch.float32)
    grid = (triton.cdiv(columns, tiles.BLOCK_N), triton.cdiv(rows, tiles.BLOCK_M), splits)
    matmul_kernel[grid](
        *(x, weight, out, rows, columns, depth, depth // splits),
        GATED=gated,
        **asdict(tiles),
        **pdl_options(),
    )
    return out


def choose_tiles(
    x: torch.Tensor, weight: torch.Tensor, *, most_rows: int = _FEW_ROWS, gated: bool = False
) -> TileSizes | None:
    """Return the fastest tile sizes on an H200; None if cuBLAS is faster or shared memory too small."""
    rows, depth = x.shape
    if rows > most_rows or weight.nbytes > _MAX_BYTES:
        return None
    aligned = weight.data_ptr() % 16 == 0 and depth % 64 == 0
    if x.element_size() != 2 or weight.dtype != x.dtype or not aligned:
        return None
    step = 128 if depth % 128 == 0 else 64
    columns, wanted = (32, 5) if rows <= _FEW_ROWS else (64, 4)
    stage = (_ROWS + columns * (2 if gated else 1)) * step * 2  # bytes
    stages = min(wanted, shared_memory() // stage)
    if stages < 2:
        return None
    return TileSizes(BLOCK_M=_ROWS, BLOCK_N=columns, BLOCK_K=step, num_warps=4, num_stages=stages)


def choose_split_k(rows: int, depth: int, step: int) -> int:
    """Return the split-K factor that gives every SM work; more rows already give more programs."""
    most = 4 if rows <= _MAX_ROWS // 2 else 2
    return next(splits for splits in (most, 2, 1) if depth % (splits * step) == 0)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,  # [rows, depth]
    weight,  # [columns, depth]; GATED: [2 * columns, depth], gate above up
    out,  # [splits, rows, columns]
    rows,
    columns,
    depth,
    split_depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    inside = column < columns
    first = weight + tl.where(inside, column, 0).to(tl.int64) * depth + split * split_depth
    if PDL:
        nbytes = tl.zeros([BLOCK_N], tl.int32) + split_depth * 2
        prefetch_l2(first.to(tl.int64), nbytes)
        if GATED:
            prefetch_l2((first + columns * depth).to(tl.int64), nbytes)
        pdl_wait()
    k = tl.arange(0, BLOCK_K)
    real = row < rows
    source = x + tl.where(real, row, 0).to(tl.int64)[:, None] * depth + split * split_depth
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, split_depth, BLOCK_K):
        a = tl.load(source + (start + k)[None, :], mask=real[:, None], other=0.0)
        b = tl.load(first[None, :] + (start + k)[:, None])
        total = tl.dot(a, b, total)
        if GATED:
            c = tl.load(first[None, :] + columns * depth + (start + k)[:, None])
            up = tl.dot(a, c, up)
    kind = out.dtype.element_ty
    if GATED:  # rounded where separate operations round
        gate = total.to(kind).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        total = active * up.to(kind).to(tl.float32)
    at = (split * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, total.to(kind), mask=real[:, None] & inside[None, :])
