"""Matrix products on a GPU: the kernels in Triton for few rows, the library's for others. Needs triton."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import asdict

import torch
import torch.nn.functional as F
import triton

from slime.engine.kernels import triton_matmuls as triton_products
from slime.engine.kernels.cuda_device import early_launch, shared_memory
from slime.engine.kernels.cuda_tiles import Blocks

_MOST_ROWS = 256
_FEW_ROWS = 64
_ROWS = 64  # of a block, even where there are fewer: that is what the matrix units take at a time
_MOST_BYTES = 12 << 20  # of a matrix: with larger ones the library keeps every multiprocessor busy


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    blocks = None if bias is not None else choose_blocks(x, weight)
    if blocks is None:
        return F.linear(x, weight, bias)
    return product(x, weight, blocks)[0]


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, columns], or [parts, rows, columns] in float32 that have to be added up."""
    blocks = None if bias is not None else choose_blocks(x, weight, most_rows=_MOST_ROWS)
    if blocks is None:
        return F.linear(x, weight, bias)
    return product(x, weight, blocks, parts=choose_parts(*x.shape, blocks.DEPTH))


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """silu(gate) * up of weight [gate | up, depth], or None where that is not for these kernels."""
    blocks = choose_blocks(x, weight, gated=True)
    return None if blocks is None else product(x, weight, blocks, gated=True)[0]


def product(
    x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, *, parts: int = 1, gated: bool = False
) -> torch.Tensor:
    """[parts, rows, columns], in float32 where there are several parts."""
    rows, depth = x.shape
    columns = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(parts, rows, columns, dtype=x.dtype if parts == 1 else torch.float32)
    grid = (triton.cdiv(columns, blocks.COLUMNS), triton.cdiv(rows, blocks.ROWS), parts)
    triton_products.product_kernel[grid](
        *(x, weight, out, rows, columns, depth, depth // parts),
        GATED=gated,
        **asdict(blocks),
        **early_launch(),
    )
    return out


def choose_blocks(
    x: torch.Tensor, weight: torch.Tensor, *, most_rows: int = _FEW_ROWS, gated: bool = False
) -> Blocks | None:
    """What was fastest on an H200; None where the library is, or where the GPU has no room for it."""
    rows, depth = x.shape
    if rows > most_rows or weight.nbytes > _MOST_BYTES:
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
    return Blocks(ROWS=_ROWS, COLUMNS=columns, DEPTH=step, num_warps=4, num_stages=stages)


def choose_parts(rows: int, depth: int, step: int) -> int:
    """Of the depth: enough that every multiprocessor has some; more rows give more programs already."""
    most = 4 if rows <= _MOST_ROWS // 2 else 2
    return next(parts for parts in (most, 2, 1) if depth % (parts * step) == 0)
