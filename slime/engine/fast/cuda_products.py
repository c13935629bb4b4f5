"""Matrix products on a GPU: the kernels in Triton for few rows, the library's for others. Needs triton."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton

from slime.engine.fast import triton_products
from slime.engine.fast.cuda_device import early_launch, shared_memory

_MOST_ROWS = 256
_FEW_ROWS = 64
_ROWS = 64  # of a block, even where there are fewer: that is what the matrix units take at a time
_MOST_BYTES = 12 << 20  # of a matrix: with larger ones the library keeps every multiprocessor busy


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What a program has before it, how many loads of it are under way, and parts of the depth."""

    ROWS: int
    COLUMNS: int
    DEPTH: int
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    blocks = None if bias is not None else choose_blocks(x, weight)
    if blocks is None:
        return F.linear(x, weight, bias)
    return product(x, weight, blocks)[0]


def linear_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, columns], or [parts, rows, columns] in float32 that have to be added up."""
    blocks = None if bias is not None else choose_blocks(x, weight, in_parts=True)
    return F.linear(x, weight, bias) if blocks is None else product(x, weight, blocks)


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """silu(gate) * up of weight [gate | up, depth], or None where that is not for these kernels."""
    blocks = choose_blocks(x, weight, gated=True)
    return None if blocks is None else product(x, weight, blocks, gated=True)[0]


def product(
    x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, gated: bool = False
) -> torch.Tensor:
    rows, depth = x.shape
    columns = weight.shape[0] // (2 if gated else 1)
    dtype = x.dtype if blocks.parts == 1 else torch.float32
    out = x.new_empty(blocks.parts, rows, columns, dtype=dtype)
    grid = (triton.cdiv(columns, blocks.COLUMNS), triton.cdiv(rows, blocks.ROWS), blocks.parts)
    triton_products.product_kernel[grid](
        *(x, weight, out, rows, columns, depth, depth // blocks.parts),
        ROWS=blocks.ROWS,
        COLUMNS=blocks.COLUMNS,
        DEPTH=blocks.DEPTH,
        GATED=gated,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **early_launch(),
    )
    return out


def choose_blocks(
    x: torch.Tensor, weight: torch.Tensor, *, in_parts: bool = False, gated: bool = False
) -> Blocks | None:
    """What was fastest on an H200; None where the library is, or where the GPU has no room for it."""
    rows, depth = x.shape
    if rows > (_MOST_ROWS if in_parts else _FEW_ROWS) or weight.nbytes > _MOST_BYTES:
        return None
    aligned = weight.data_ptr() % 16 == 0 and depth % 64 == 0
    if x.element_size() != 2 or weight.dtype != x.dtype or not aligned:
        return None
    step = 128 if depth % 128 == 0 else 64
    columns, stages = (32, 5) if rows <= _FEW_ROWS else (64, 4)
    wanted = 1 if not in_parts else 4 if rows <= _MOST_ROWS // 2 else 2
    parts = next(n for n in (wanted, 2, 1) if depth % (n * step) == 0)
    lines = _ROWS + columns * (2 if gated else 1)
    stages = min(stages, shared_memory() // (lines * step * 2))
    if stages < 2:
        return None
    return Blocks(ROWS=_ROWS, COLUMNS=columns, DEPTH=step, parts=parts, num_stages=stages)
