"""Split-K matmul for the few rows of a decoding step, bound by the bandwidth of reading the weight.

A program computes one tile of the output over one split of K. With PDL its part of the weight is prefetched
into L2 before the preceding kernel has finished; the partial sums are added up by the RMSNorm that follows.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import pdl_wait, prefetch_l2


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x,  # [rows, depth]
    weight,  # [columns, depth]; GATED: [2 * columns, depth], gate above up
    out,  # [splits, rows, columns]
    rows,
    columns,
    depth,
    split_depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
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
