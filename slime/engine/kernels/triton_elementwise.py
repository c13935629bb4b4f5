"""RMSNorm, RoPE with KV cache write, and activation in Triton, one token per program."""

# pyright: reportMissingImports=false
# Triton's `static_range` has no `__iter__` for type checkers.
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import pdl_options, pdl_wait

_BLOCK = 1024  # columns per program of gate_heads and add_gated


def gate_heads(x: torch.Tensor, gates: torch.Tensor, dim: int) -> torch.Tensor:
    """Multiply heads by sigmoids of their gates; see `Kernels.gate_heads`."""
    tokens, size = x.shape
    out = torch.empty_like(x)
    gate_heads_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        *(x, gates, out, gates.stride(0)),
        SIZE=size,
        DIM=dim,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(),
    )
    return out


def add_gated(x: torch.Tensor, gate: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Add gated partial sums; see `Kernels.add_gated`."""
    tokens, size = x.shape
    out = torch.empty_like(x)
    add_gated_kernel[(tokens, triton.cdiv(size, _BLOCK))](
        *(x, gate, parts, out, tokens),
        SIZE=size,
        BLOCK=_BLOCK,
        SPLIT_K=parts.numel() // x.numel(),
        num_warps=4,
        **pdl_options(),
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def add_rms_norm_kernel(
    hidden,
    delta,  # [SPLIT_K, T, SIZE]
    weight,
    out,
    eps,
    tokens,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, ZERO_CENTRED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
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
    normed = x * inverse
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        w += 1.0
    else:  # rounded before the weight, as Hugging Face's norms do
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (normed * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_store_kernel(
    qkv,
    rows,
    positions,
    angles,  # [T], rows of cosines and sines
    table,
    keys,
    values,
    cosines,
    sines,
    query_norm,
    key_norm,
    norm_order,  # [DIM], which weight of a norm belongs to each dimension
    eps,
    table_width,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply QK norm and RoPE to queries in place; store keys and values in their page.

    ORDERED: weights of the norms have another order, and are stored minus one.
    """
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
        a, b = a * inverse, b * inverse
        at_a, at_b = i, half + i
        if ORDERED:
            at_a = tl.load(norm_order + i, mask=i < half, other=0)
            at_b = tl.load(norm_order + half + i, mask=i < half, other=0)
        else:  # rounded before the weight, as in norms that are not zero-centred
            a = a.to(qkv.dtype.element_ty).to(tl.float32)
            b = b.to(qkv.dtype.element_ty).to(tl.float32)
        query_a = tl.load(query_norm + at_a, mask=i < half, other=0.0).to(tl.float32)
        query_b = tl.load(query_norm + at_b, mask=i < half, other=0.0).to(tl.float32)
        key_a = tl.load(key_norm + at_a, mask=i < half, other=0.0).to(tl.float32)
        key_b = tl.load(key_norm + at_b, mask=i < half, other=0.0).to(tl.float32)
        weight_a = tl.where(is_query, query_a, key_a)
        weight_b = tl.where(is_query, query_b, key_b)
        if ORDERED:
            weight_a, weight_b = weight_a + 1.0, weight_b + 1.0
        a = (a * weight_a).to(qkv.dtype.element_ty).to(tl.float32)
        b = (b * weight_b).to(qkv.dtype.element_ty).to(tl.float32)
    angle = tl.load(angles + token).to(tl.int64) * DIM + i
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


@triton.jit(do_not_specialize=["gate_stride"])
def gate_heads_kernel(
    x,  # [T, SIZE]
    gate,  # [T, 2 * SIZE], rows `gate_stride` apart; each head's gate follows DIM other columns
    out,  # [T, SIZE]
    gate_stride,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    column = (i // DIM) * (2 * DIM) + DIM + i % DIM
    g = tl.load(gate + token * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    value = tl.load(x + token * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + i, (value * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def add_gated_kernel(
    x,  # [T, SIZE]
    gate,  # [T]
    parts,  # [SPLIT_K, T, SIZE]
    out,
    tokens,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        at = (split * tokens + token) * SIZE + i
        total += tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    g = tl.load(gate + token).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    added = (total * factor).to(out.dtype.element_ty).to(tl.float32)
    value = tl.load(x + token * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + i, (value + added).to(out.dtype.element_ty), mask=mask)
