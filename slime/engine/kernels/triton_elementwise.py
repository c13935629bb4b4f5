"""RMSNorm, RoPE with KV cache write, and activation in Triton, one token per program."""

# pyright: reportMissingImports=false
# Triton's `static_range` has no `__iter__` for type checkers.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import pdl_wait


@triton.jit(do_not_specialize=["tokens"])
def add_rms_norm_kernel(
    hidden,
    delta,  # [SPLIT_K, T, SIZE]
    weight,
    out,
    eps,
    tokens,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    at = token * SIZE + i
    x = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLIT_K):
        added = delta + split * tokens * SIZE + at
        x += tl.load(added, mask=mask, other=0.0).to(tl.float32)
    if SPLIT_K > 0:
        rounded = x.to(hidden.dtype.element_ty)
        tl.store(hidden + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    # Rounded before the weight, as Hugging Face's norms do.
    normed = (x * inverse).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_store_kernel(
    qkv,
    rows,
    positions,
    table,
    keys,
    values,
    cosines,
    sines,
    query_norm,
    key_norm,
    eps,
    table_width,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply QK norm and RoPE to queries in place; store keys and values in their page."""
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    page = tl.load(table + row * table_width + position // PAGE).to(tl.int64)
    slot = page * PAGE + position % PAGE
    half: tl.constexpr = DIM // 2
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    real = (head < QUERY_HEADS + KEY_HEADS) & (i < half)
    base = qkv + token * ((QUERY_HEADS + 2 * KEY_HEADS) * DIM)
    a = tl.load(base + head * DIM + i, mask=real, other=0.0).to(tl.float32)
    b = tl.load(base + head * DIM + half + i, mask=real, other=0.0).to(tl.float32)
    is_query = head < QUERY_HEADS
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        inverse = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        a = (a * inverse).to(qkv.dtype.element_ty).to(tl.float32)
        b = (b * inverse).to(qkv.dtype.element_ty).to(tl.float32)
        query_a = tl.load(query_norm + i, mask=i < half, other=0.0).to(tl.float32)
        query_b = tl.load(query_norm + half + i, mask=i < half, other=0.0).to(tl.float32)
        key_a = tl.load(key_norm + i, mask=i < half, other=0.0).to(tl.float32)
        key_b = tl.load(key_norm + half + i, mask=i < half, other=0.0).to(tl.float32)
        a = (a * tl.where(is_query, query_a, key_a)).to(qkv.dtype.element_ty).to(tl.float32)
        b = (b * tl.where(is_query, query_b, key_b)).to(qkv.dtype.element_ty).to(tl.float32)
    angle = position * DIM + i
    cos_a = tl.load(cosines + angle, mask=i < half, other=0.0).to(tl.float32)
    cos_b = tl.load(cosines + angle + half, mask=i < half, other=0.0).to(tl.float32)
    sin_a = tl.load(sines + angle, mask=i < half, other=0.0).to(tl.float32)
    sin_b = tl.load(sines + angle + half, mask=i < half, other=0.0).to(tl.float32)
    rotated_a = (a * cos_a - b * sin_a).to(qkv.dtype.element_ty)
    rotated_b = (b * cos_b + a * sin_b).to(qkv.dtype.element_ty)
    tl.store(base + head * DIM + i, rotated_a, mask=real & is_query)
    tl.store(base + head * DIM + half + i, rotated_b, mask=real & is_query)
    key_at = keys + slot * (KEY_HEADS * DIM) + (head - QUERY_HEADS) * DIM + i
    tl.store(key_at, rotated_a, mask=real & (head >= QUERY_HEADS))
    tl.store(key_at + half, rotated_b, mask=real & (head >= QUERY_HEADS))
    v = tl.arange(0, VALUE_BLOCK)
    in_value = v < KEY_HEADS * DIM
    value = tl.load(base + (QUERY_HEADS + KEY_HEADS) * DIM + v, mask=in_value)
    tl.store(values + slot * (KEY_HEADS * DIM) + v, value, mask=in_value)


@triton.jit
def silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * SIZE + i, (active * up).to(out.dtype.element_ty), mask=mask)
