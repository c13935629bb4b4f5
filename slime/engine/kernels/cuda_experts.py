"""Launches the MoE kernels of triton_experts.py: grids and tile sizes."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import asdict

import torch
import triton

from slime.engine.kernels import triton_experts
from slime.engine.kernels.triton_launch import TileSizes

_SCAN_BLOCK = 1024  # (token, expert) pairs scanned per iteration
_SUM_BLOCK = 1024


class CudaExperts:
    def route(
        self, logits: torch.Tensor, top: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, num = logits.shape
        experts = logits.new_empty(count, top, dtype=torch.int32)
        weights = logits.new_empty(count, top)
        triton_experts.route_kernel[(count,)](
            *(logits, experts, weights),
            NUM=num,
            BLOCK=triton.next_power_of_2(num),
            TOP=top,
            TOP_BLOCK=triton.next_power_of_2(top),
            NORM=normalize,
            num_warps=1,
        )
        return experts, weights

    def run_experts(
        self,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        tokens, top = experts.shape
        num, size, width = down.shape
        lists, counts = _list_pairs(experts, num)
        tiles = choose_tiles(tokens * top / num, hidden.element_size())
        shape = {"HIDDEN": size, "WIDTH": width, "PRECISION": dot_precision(hidden)}
        active = hidden.new_empty(tokens * top, width)
        triton_experts.gate_up_kernel[(triton.cdiv(width, tiles.BLOCK_N), num)](
            *(hidden, gate_up, lists, counts, active, tokens), **shape, TOP=top, **asdict(tiles)
        )
        outputs = hidden.new_empty(tokens * top, size)  # of each (token, expert) pair
        triton_experts.down_kernel[(triton.cdiv(size, tiles.BLOCK_N), num)](
            *(active, down, weights, lists, counts, outputs, tokens), **shape, **asdict(tiles)
        )
        out = torch.empty_like(hidden)
        block = min(triton.next_power_of_2(size), _SUM_BLOCK)
        triton_experts.sum_kernel[(tokens, triton.cdiv(size, block))](
            outputs, out, SIZE=size, TOP=top, BLOCK=block, num_warps=4
        )
        return out


def choose_tiles(pairs_per_expert: float, element_size: int) -> TileSizes:
    """Return the fastest tile sizes on an H200 for experts of 768 x 2048, for both matmuls."""
    if element_size == 4:
        return TileSizes(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)
    if pairs_per_expert <= 8:
        return TileSizes(BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3)
    if pairs_per_expert <= 16:
        return TileSizes(BLOCK_M=32, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3)
    if pairs_per_expert <= 64:
        return TileSizes(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)
    return TileSizes(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3)


def _list_pairs(experts: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Group the (token, expert) pairs by expert: return pair indices [num, tokens] and their counts [num]."""
    lists = experts.new_empty(num, experts.shape[0])
    counts = experts.new_empty(num)
    triton_experts.list_kernel[(num,)](
        *(experts, lists, counts, experts.numel(), experts.shape[0]), BLOCK=_SCAN_BLOCK, num_warps=4
    )
    return lists, counts


def dot_precision(tensor: torch.Tensor) -> str:
    """Return the input precision of tl.dot for this dtype."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
