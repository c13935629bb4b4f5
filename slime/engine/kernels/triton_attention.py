"""Attention over the paged KV cache in Triton: split-KV decode, and prefill in tiles of queries.

Keys and values of a layer are [pages, page_size, heads, dim]; position p of row r of the page table
lies in page table[r, p // page_size]. Scores are kept in base 2 (log2(e) is part of the scale).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import pdl_wait


@triton.jit
def decode_kernel(
    qkv,  # [T, width]
    keys,
    values,
    table,
    rows,  # [T]
    positions,  # [T]
    out,  # [T, query heads * dim], or partial sums [T, key heads, SPLITS, GROUP_BLOCK, DIM_BLOCK]
    stats,  # [T, key heads, SPLITS, GROUP_BLOCK, 2]: maximum score and softmax denominator
    scale,
    width,
    table_width,
    window,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with all query heads that share one key head of one request, over one split of its positions.

    The heads of a request are adjacent programs, so they read contiguous memory.
    """
    if PDL:
        pdl_wait()
    head = tl.program_id(0)
    token = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + token).to(tl.int64)
    length = tl.load(positions + token) + 1
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0) // BLOCK * BLOCK
    split_len = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    low = first + split * split_len
    high = tl.minimum(length, low + split_len)
    group = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    in_group = group < GROUP
    in_dim = dim < DIM
    query_at = token.to(tl.int64) * width + (head * GROUP + group)[:, None] * DIM + dim[None, :]
    query = tl.load(qkv + query_at, mask=in_group[:, None] & in_dim[None, :], other=0.0)
    most = tl.full([GROUP_BLOCK], -1e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    sums = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(low, high, BLOCK):
        position = start + tl.arange(0, BLOCK)
        known = position < high
        page = tl.load(table + row * table_width + position // PAGE, mask=known, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        at = slot[:, None] * (KEY_HEADS * DIM) + head * DIM + dim[None, :]
        mask = known[:, None] & in_dim[None, :]
        key = tl.load(keys + at, mask=mask, other=0.0)
        value = tl.load(values + at, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        visible = known
        if WINDOWED:
            visible = known & (position > length - 1 - window)
        scores = tl.where(visible[None, :], scores, -1e30)
        highest = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        weights = tl.where(visible[None, :], weights, 0.0)
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        most = highest
    if SPLITS == 1:
        out_at = (token.to(tl.int64) * KEY_HEADS + head) * GROUP * DIM
        out_at += group[:, None] * DIM + dim[None, :]
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at, result, mask=in_group[:, None] & in_dim[None, :])
    else:
        at = ((token.to(tl.int64) * KEY_HEADS + head) * SPLITS + split) * GROUP_BLOCK + group
        tl.store(out + at[:, None] * DIM_BLOCK + dim[None, :], sums)
        tl.store(stats + at * 2, most)
        tl.store(stats + at * 2 + 1, total)


@triton.jit
def combine_kernel(
    partial,
    stats,
    out,  # [T, query heads * dim]
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of one query head."""
    if PDL:
        pdl_wait()
    token = tl.program_id(0)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    group = query_head % GROUP
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_BLOCK)
    at = ((token.to(tl.int64) * KEY_HEADS + head) * SPLITS + split) * GROUP_BLOCK + group
    most = tl.load(stats + at * 2)
    weight = tl.exp2(most - tl.max(most, 0))
    total = tl.sum(tl.load(stats + at * 2 + 1) * weight, 0)
    parts = tl.load(partial + at[:, None] * DIM_BLOCK + dim[None, :])
    result = tl.sum(parts * weight[:, None], 0) / total
    out_at = (token.to(tl.int64) * KEY_HEADS * GROUP + query_head) * DIM + dim
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def prefill_kernel(
    qkv,
    keys,
    values,
    table,
    rows,
    positions,
    tiles,  # [N, 2]: first token and number of tokens
    out,
    scale,
    width,
    table_width,
    window,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one query head for a tile of consecutive tokens of one request."""
    tile = tl.program_id(1)
    query_head = tl.program_id(0)
    head = query_head // GROUP
    first = tl.load(tiles + tile * 2)
    count = tl.load(tiles + tile * 2 + 1)
    row = tl.load(rows + first).to(tl.int64)
    start = tl.load(positions + first)
    offset = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_BLOCK)
    in_tile = offset < count
    in_dim = dim < DIM
    token = (first + offset).to(tl.int64)
    query_at = token[:, None] * width + query_head * DIM + dim[None, :]
    query = tl.load(qkv + query_at, mask=in_tile[:, None] & in_dim[None, :], other=0.0)
    query_position = start + offset
    most = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, DIM_BLOCK], tl.float32)
    end = start + count
    low = 0
    if WINDOWED:
        low = tl.maximum(start + 1 - window, 0) // BLOCK * BLOCK
    for at in range(low, end, BLOCK):
        position = at + tl.arange(0, BLOCK)
        known = position < end
        page = tl.load(table + row * table_width + position // PAGE, mask=known, other=0)
        slot = page.to(tl.int64) * PAGE + position % PAGE
        where = slot[:, None] * (KEY_HEADS * DIM) + head * DIM + dim[None, :]
        mask = known[:, None] & in_dim[None, :]
        key = tl.load(keys + where, mask=mask, other=0.0)
        value = tl.load(values + where, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        visible = position[None, :] <= query_position[:, None]
        if WINDOWED:
            visible = visible & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(visible, scores, -1e30)
        highest = tl.maximum(most, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp2(scores - highest[:, None]), 0.0)
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        most = highest
    out_at = token[:, None] * (KEY_HEADS * GROUP * DIM) + query_head * DIM + dim[None, :]
    result = (sums / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=in_tile[:, None] & in_dim[None, :])
