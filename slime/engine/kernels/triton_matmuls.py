"""Matrix products for the few rows of a decoding step, which are as fast as their matrix is read.

A program has some columns of the result over one part of the depth. Its rows of the matrix are fetched
into the cache before the kernel in front is done; the parts are added up by the norm that comes next.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import fetch_rows, start_early


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,  # [rows, depth]
    matrix,  # [columns, depth]; GATED: [2 * columns, depth], gate above up
    out,  # [parts, rows, columns]
    rows,
    columns,
    depth,
    part_depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    inside = column < columns
    first = matrix + tl.where(inside, column, 0).to(tl.int64) * depth + part * part_depth
    if EARLY:
        nbytes = tl.zeros([COLUMNS], tl.int32) + part_depth * 2
        fetch_rows(first.to(tl.int64), nbytes)
        if GATED:
            fetch_rows((first + columns * depth).to(tl.int64), nbytes)
        start_early()
    k = tl.arange(0, DEPTH)
    real = row < rows
    source = x + tl.where(real, row, 0).to(tl.int64)[:, None] * depth + part * part_depth
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, part_depth, DEPTH):
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
    at = (part * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, total.to(kind), mask=real[:, None] & inside[None, :])
