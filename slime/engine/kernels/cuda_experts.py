"""A mixture of experts on the kernels in Triton: grids and block sizes. Needs triton to be imported."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import asdict

import torch
import triton

from slime.engine.kernels import triton_experts
from slime.engine.kernels.cuda_tiles import Blocks

_SCANNED = 1024  # pairs that a list takes at a time
_SUMMED = 1024


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

    def mix(
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
        blocks = choose_blocks(tokens * top / num, hidden.element_size())
        shape = {"HIDDEN": size, "WIDTH": width, "PRECISION": dot_precision(hidden)}
        active = hidden.new_empty(tokens * top, width)
        triton_experts.gate_up_kernel[(triton.cdiv(width, blocks.COLUMNS), num)](
            *(hidden, gate_up, lists, counts, active, tokens), **shape, TOP=top, **asdict(blocks)
        )
        parts = hidden.new_empty(tokens * top, size)
        triton_experts.down_kernel[(triton.cdiv(size, blocks.COLUMNS), num)](
            *(active, down, weights, lists, counts, parts, tokens), **shape, **asdict(blocks)
        )
        out = torch.empty_like(hidden)
        block = min(triton.next_power_of_2(size), _SUMMED)
        triton_experts.sum_kernel[(tokens, triton.cdiv(size, block))](
            parts, out, SIZE=size, TOP=top, BLOCK=block, num_warps=4
        )
        return out


def choose_blocks(pairs_per_expert: float, element_size: int) -> Blocks:
    """What was fastest on an H200 for experts of 768 x 2048, for both products."""
    if element_size == 4:
        return Blocks(ROWS=16, COLUMNS=32, DEPTH=32, num_warps=4, num_stages=2)
    if pairs_per_expert <= 8:
        return Blocks(ROWS=16, COLUMNS=64, DEPTH=128, num_warps=4, num_stages=3)
    if pairs_per_expert <= 16:
        return Blocks(ROWS=32, COLUMNS=64, DEPTH=128, num_warps=4, num_stages=3)
    if pairs_per_expert <= 64:
        return Blocks(ROWS=64, COLUMNS=64, DEPTH=64, num_warps=4, num_stages=4)
    return Blocks(ROWS=128, COLUMNS=64, DEPTH=64, num_warps=8, num_stages=3)


def _list_pairs(experts: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By expert: the numbers of its pairs, [num, tokens], and how many of those there are."""
    lists = experts.new_empty(num, experts.shape[0])
    counts = experts.new_empty(num)
    triton_experts.list_kernel[(num,)](
        *(experts, lists, counts, experts.numel(), experts.shape[0]), BLOCK=_SCANNED, num_warps=4
    )
    return lists, counts


def dot_precision(tensor: torch.Tensor) -> str:
    """Of Triton's matrix products."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
