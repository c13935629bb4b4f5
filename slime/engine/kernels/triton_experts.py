"""MoE in Triton: top-k routing, grouping by expert, the two grouped matmuls, and the sum over experts.

A pair is a token with one of its experts, number token * TOP + place. A program of a matmul computes some
columns for all pairs of one expert, whose weight is read once if the pairs fit into one tile, as in decoding.
No result depends on other tokens of the batch.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from slime.engine.kernels.interface import AdapterRows, LayerLora
from slime.engine.kernels.triton_expert_lora import Pairs, expand, shrink
from slime.engine.kernels.triton_launch import TileSizes, dot_precision

_SCAN_BLOCK = 1024  # (token, expert) pairs scanned per iteration
_SUM_BLOCK = 1024


class CudaExperts:
    def route(
        self, logits: torch.Tensor, top: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, num = logits.shape
        experts = logits.new_empty(count, top, dtype=torch.int32)
        weights = logits.new_empty(count, top)
        route_kernel[(count,)](
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
        lora: LayerLora | None = None,
        rows: AdapterRows | None = None,
    ) -> torch.Tensor:
        tokens, top = experts.shape
        num, size, width = down.shape
        lists, counts = _list_pairs(experts, num)
        tiles = choose_tiles(tokens * top / num, hidden.element_size())
        shape = {"HIDDEN": size, "WIDTH": width, "PRECISION": dot_precision(hidden)}
        pairs = Pairs(lists, counts, tokens, top, None if rows is None else rows.slots)
        active = hidden.new_empty(tokens * top, width)
        adapter, flags = shrink(hidden, None if lora is None else lora.gate_up, pairs, top)
        gate_up_kernel[(triton.cdiv(width, tiles.BLOCK_N), num)](
            *(hidden, gate_up, lists, counts, active, tokens, *adapter),
            **shape,
            **flags,
            TOP=top,
            **asdict(tiles),
        )
        outputs = hidden.new_empty(tokens * top, size)  # of each (token, expert) pair
        adapter, flags = shrink(active, None if lora is None else lora.down, pairs, 1)
        down_kernel[(triton.cdiv(size, tiles.BLOCK_N), num)](
            *(active, down, weights, lists, counts, outputs, tokens, *adapter),
            **shape,
            **flags,
            TOP=top,
            **asdict(tiles),
        )
        out = torch.empty_like(hidden)
        block = min(triton.next_power_of_2(size), _SUM_BLOCK)
        sum_kernel[(tokens, triton.cdiv(size, block))](
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
    list_kernel[(num,)](
        *(experts, lists, counts, experts.numel(), experts.shape[0]), BLOCK=_SCAN_BLOCK, num_warps=4
    )
    return lists, counts


@triton.jit
def route_kernel(
    logits,  # [T, NUM]
    experts,  # [T, TOP] int32
    weights,  # [T, TOP]
    NUM: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, TOP_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Select the top-k experts by softmax, ties to the lower index; with NORM the weights sum to one."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(logits + token * NUM + i, mask=i < NUM, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    total = tl.sum(x, 0)
    is_number = total == total
    # If the logits are NaN the first experts are taken, since the experts of a token must differ.
    left = tl.where(i < NUM, tl.where(is_number, x / total, 0.0), -1.0)
    place = tl.arange(0, TOP_BLOCK)
    chosen = tl.zeros([TOP_BLOCK], tl.int32)
    values = tl.zeros([TOP_BLOCK], tl.float32)
    for n in tl.static_range(TOP):
        best = tl.max(left, 0)
        at = tl.min(tl.where(left == best, i, BLOCK), 0)
        chosen = tl.where(place == n, at, chosen)
        values = tl.where(place == n, best, values)
        left = tl.where(i == at, -1.0, left)
    if NORM:
        values = values / tl.sum(values, 0)
    values = tl.where(is_number, values, float("nan"))
    pair = token * TOP + place
    tl.store(experts + pair, chosen, mask=place < TOP)
    tl.store(weights + pair, values.to(weights.dtype.element_ty), mask=place < TOP)


@triton.jit
def list_kernel(experts, lists, counts, num_pairs, capacity, BLOCK: tl.constexpr):
    """List the pairs of one expert in order, and count them."""
    expert = tl.program_id(0)
    found = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        place = found + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(lists + expert.to(tl.int64) * capacity + place, pair, mask=mine)
        found += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, found)


@triton.jit
def gate_up_kernel(
    hidden,  # [T, HIDDEN]
    matrices,  # [experts, 2 * WIDTH, HIDDEN]
    lists,
    counts,
    out,  # [T * TOP, WIDTH]
    capacity,
    low,  # [T * TOP, RANK] float32: of adapters, if SLOTS
    lora_b,  # [SLOTS, experts, 2 * WIDTH, RANK]
    slots,  # [T] int32
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up of every pair by a grouped matmul."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    matrix = matrices + expert * (2 * WIDTH * HIDDEN) + column[None, :] * HIDDEN
    for first in range(0, count, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        pair = tl.load(lists + expert * capacity + row, mask=row < count, other=0).to(tl.int64)
        source = hidden + (pair // TOP)[:, None] * HIDDEN
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            k = start + depth
            wanted, inside = (row < count)[:, None], (column < WIDTH)[None, :]
            if HIDDEN % BLOCK_K != 0:
                wanted, inside = wanted & (k < HIDDEN)[None, :], inside & (k < HIDDEN)[:, None]
            a = tl.load(source + k[None, :], mask=wanted, other=0.0)
            b = tl.load(matrix + k[:, None], mask=inside, other=0.0)
            gate = tl.dot(a, b, gate, input_precision=PRECISION)
            c = tl.load(matrix + WIDTH * HIDDEN + k[:, None], mask=inside, other=0.0)
            up = tl.dot(a, c, up, input_precision=PRECISION)
        if SLOTS > 0:
            slot = tl.load(slots + pair // TOP, mask=row < count, other=-1)
            stride = tl.num_programs(1).to(tl.int64) * (2 * WIDTH * RANK)
            first_b = lora_b + (expert * (2 * WIDTH) + column)[None, :] * RANK
            gate = expand(
                gate,
                low,
                first_b,
                pair,
                slot,
                column < WIDTH,
                stride,
                SLOTS,
                RANK,
                RANK_BLOCK,
                PRECISION,
            )
            up = expand(
                up,
                low,
                first_b + WIDTH * RANK,
                pair,
                slot,
                column < WIDTH,
                stride,
                SLOTS,
                RANK,
                RANK_BLOCK,
                PRECISION,
            )
        kind = out.dtype.element_ty
        gate = gate.to(kind).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = (active * up.to(kind).to(tl.float32)).to(kind)
        target = out + pair[:, None] * WIDTH + column[None, :]
        tl.store(target, result, mask=(row < count)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def down_kernel(
    active,  # [T * TOP, WIDTH]
    matrices,  # [experts, HIDDEN, WIDTH]
    weights,  # [T * TOP]
    lists,
    counts,
    out,  # [T * TOP, HIDDEN]
    capacity,
    low,  # [T * TOP, RANK] float32: of adapters, if SLOTS
    lora_b,  # [SLOTS, experts, HIDDEN, RANK]
    slots,  # [T] int32
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the down projection of every pair, times its routing weight, by a grouped matmul."""
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    matrix = matrices + expert * (HIDDEN * WIDTH) + column[None, :] * WIDTH
    for first in range(0, count, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        pair = tl.load(lists + expert * capacity + row, mask=row < count, other=0).to(tl.int64)
        source = active + pair[:, None] * WIDTH
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            k = start + depth
            wanted, inside = (row < count)[:, None], (column < HIDDEN)[None, :]
            if WIDTH % BLOCK_K != 0:
                wanted, inside = wanted & (k < WIDTH)[None, :], inside & (k < WIDTH)[:, None]
            a = tl.load(source + k[None, :], mask=wanted, other=0.0)
            b = tl.load(matrix + k[:, None], mask=inside, other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        if SLOTS > 0:
            slot = tl.load(slots + pair // TOP, mask=row < count, other=-1)
            stride = tl.num_programs(1).to(tl.int64) * (HIDDEN * RANK)
            first_b = lora_b + (expert * HIDDEN + column)[None, :] * RANK
            total = expand(
                total,
                low,
                first_b,
                pair,
                slot,
                column < HIDDEN,
                stride,
                SLOTS,
                RANK,
                RANK_BLOCK,
                PRECISION,
            )
        kind = out.dtype.element_ty
        weight = tl.load(weights + pair, mask=row < count, other=0.0).to(tl.float32)
        result = (total.to(kind).to(tl.float32) * weight[:, None]).to(kind)
        target = out + pair[:, None] * HIDDEN + column[None, :]
        tl.store(target, result, mask=(row < count)[:, None] & (column < HIDDEN)[None, :])


@triton.jit
def sum_kernel(outputs, out, SIZE: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Sum [T, TOP, SIZE] over the experts of each token: [T, SIZE]."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(TOP):
        source = outputs + (token * TOP + n) * SIZE + i
        total += tl.load(source, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + i, total.to(out.dtype.element_ty), mask=i < SIZE)
