"""Gated delta nets in Triton: gates, convolution, norm, and the delta rule for decoding rows.

    b, a ─ delta_gates ──────────────┐
    qkv ─ conv_rows ─ delta_rows ────┴─▶ gated_norm ─▶ output projection

Convolution and delta rule update the states of the rows in place. The tokens of one row are contiguous; the
program of the first loops over all of them. With one token per row (decoding) all rows run in parallel, and in
deterministic mode a token's bits do not depend on how many tokens of its row share the forward. All inputs are
read from device memory, so one CUDA graph serves any rows.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.algorithms.delta_layers import DeltaInputs
from slime.algorithms.gated_delta import DeltaHeads
from slime.engine.kernels.triton_launch import pdl_options, pdl_wait
from slime.engine.kv_cache import StateCache

_CHANNELS = 256  # of the convolution per program
_VALUES = 32  # columns of a state per program
_NORM_HEADS = 8  # per program of the norm after the delta rule


def continue_rows(
    inputs: DeltaInputs,
    weight: torch.Tensor,
    heads: DeltaHeads,
    states: StateCache,
    layer: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Continue the row of each token; see `Kernels.continue_rows`."""
    mixed, (count, channels) = inputs.mixed_qkv, inputs.mixed_qkv.shape
    convolved = torch.empty_like(mixed, memory_format=torch.contiguous_format)
    index, num_layers = states.index_of(layer), len(states.shape.layers)
    conv_rows_kernel[(count, triton.cdiv(channels, _CHANNELS))](
        *(mixed, weight.contiguous(), states.windows, convolved, rows),
        *(count, index, mixed.stride(0)),
        NUM_LAYERS=num_layers,
        CHANNELS=channels,
        KERNEL=weight.shape[1],
        BLOCK=_CHANNELS,
        num_warps=4,
        **pdl_options(),
    )
    out = mixed.new_empty(count, heads.num_value, heads.value_dim)
    delta_rows_kernel[(count, heads.num_value, triton.cdiv(heads.value_dim, _VALUES))](
        *(convolved, inputs.decay.contiguous(), inputs.beta.contiguous(), states.matrices, out),
        *(rows, count, index, heads.key_dim**-0.5),
        NUM_LAYERS=num_layers,
        CHANNELS=channels,
        KEY_HEADS=heads.num_key,
        VALUE_HEADS=heads.num_value,
        KEY_DIM=heads.key_dim,
        KEY_BLOCK=triton.next_power_of_2(heads.key_dim),
        VALUE_DIM=heads.value_dim,
        VALUE_BLOCK=_VALUES,
        num_warps=4,
        **pdl_options(),
    )
    return out


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decay and beta of columns a and b of a matmul; see `Kernels.delta_gates`."""
    count, heads = a.shape
    decay = a.new_empty(count, heads, dtype=torch.float32)
    beta = b.new_empty(count, heads)
    delta_gates_kernel[(count,)](
        *(a, b, a_log, dt_bias, decay, beta, a.stride(0), b.stride(0)),
        HEADS=heads,
        BLOCK=triton.next_power_of_2(heads),
        num_warps=1,
        **pdl_options(),
    )
    return decay, beta


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return RMSNorm of each head of x times silu(gate); see `Kernels.gated_norm`."""
    count, heads, dim = x.shape
    out = x.new_empty(count, heads * dim)
    gated_norm_kernel[(count, triton.cdiv(heads, _NORM_HEADS))](
        *(x, gate, weight, out, eps, gate.stride(0)),
        HEADS=heads,
        HEADS_BLOCK=_NORM_HEADS,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        num_warps=4,
        **pdl_options(),
    )
    return out


@triton.jit(do_not_specialize=["tokens", "layer", "mixed_stride"])
def conv_rows_kernel(
    mixed,  # [T, CHANNELS], rows `mixed_stride` apart
    weight,  # [CHANNELS, KERNEL]
    windows,  # [rows, NUM_LAYERS, KERNEL - 1, CHANNELS]
    out,  # [T, CHANNELS]
    rows,
    tokens,
    layer,
    mixed_stride,
    NUM_LAYERS: tl.constexpr, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait()
    first = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + first).to(tl.int64)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1).to(tl.int64)
    if before != row:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = c < CHANNELS
        window = windows + (row * NUM_LAYERS + layer) * (KERNEL - 1) * CHANNELS + c
        token = first
        here = row
        while here == row:
            total = tl.zeros([BLOCK], tl.float32)
            for tap in tl.static_range(KERNEL):
                at = token - (KERNEL - 1) + tap  # before `first`: in the window
                old = tl.load(
                    window + (at - first + KERNEL - 1) * CHANNELS,
                    mask=mask & (at < first),
                    other=0.0,
                )
                new = tl.load(mixed + at * mixed_stride + c, mask=mask & (at >= first), other=0.0)
                x = tl.where(at < first, old, new).to(tl.float32)
                total += x * tl.load(weight + c * KERNEL + tap, mask=mask, other=0.0).to(tl.float32)
            total = total.to(out.dtype.element_ty).to(tl.float32)
            active = total / (1.0 + tl.exp(-total))
            tl.store(out + token * CHANNELS + c, active.to(out.dtype.element_ty), mask=mask)
            token += 1
            here = tl.load(rows + token, mask=token < tokens, other=-1).to(tl.int64)
        for slot in tl.static_range(KERNEL - 1):  # ascending: reads are ahead of writes
            at = token - (KERNEL - 1) + slot
            old = tl.load(
                window + (at - first + KERNEL - 1) * CHANNELS, mask=mask & (at < first), other=0.0
            )
            new = tl.load(mixed + at * mixed_stride + c, mask=mask & (at >= first), other=0.0)
            tl.store(window + slot * CHANNELS, tl.where(at < first, old, new), mask=mask)


@triton.jit(do_not_specialize=["tokens", "layer"])
def delta_rows_kernel(
    convolved,  # [T, CHANNELS]: queries, keys, values
    decay,  # [T, VALUE_HEADS] float32, log
    beta,  # [T, VALUE_HEADS]
    matrices,  # [rows, NUM_LAYERS, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32
    out,  # [T, VALUE_HEADS, VALUE_DIM]
    rows,
    tokens,
    layer,
    scale,
    NUM_LAYERS: tl.constexpr, CHANNELS: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait()
    first = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + first).to(tl.int64)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1).to(tl.int64)
    if before != row:
        head = tl.program_id(1)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i = tl.arange(0, KEY_BLOCK)
        v = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
        in_key, in_value = i < KEY_DIM, v < VALUE_DIM
        real = in_key[:, None] & in_value[None, :]
        state_at = matrices + ((row * NUM_LAYERS + layer) * VALUE_HEADS + head) * (
            KEY_DIM * VALUE_DIM
        )
        state_at += i[:, None] * VALUE_DIM + v[None, :]
        state = tl.load(state_at, mask=real, other=0.0)
        token = first
        here = row
        while here == row:
            base = convolved + token * CHANNELS
            q = tl.load(base + key_head * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(base + (KEY_HEADS + key_head) * KEY_DIM + i, mask=in_key, other=0.0).to(
                tl.float32
            )
            x = tl.load(
                base + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v, mask=in_value, other=0.0
            ).to(tl.float32)
            q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6))
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
            state = state * tl.exp(tl.load(decay + token * VALUE_HEADS + head))
            held = tl.sum(state * k[:, None], 0)
            change = (x - held) * tl.load(beta + token * VALUE_HEADS + head).to(tl.float32)
            state = state + k[:, None] * change[None, :]
            result = tl.sum(state * q[:, None], 0).to(out.dtype.element_ty)
            tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + v, result, mask=in_value)
            token += 1
            here = tl.load(rows + token, mask=token < tokens, other=-1).to(tl.int64)
        tl.store(state_at, state, mask=real)


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def delta_gates_kernel(
    a,
    b,
    a_log,  # [HEADS]
    dt_bias,  # [HEADS]
    decay,  # [T, HEADS] float32
    beta,  # [T, HEADS]
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < HEADS
    x = tl.load(a + token * a_stride + i, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + i, mask=mask, other=0.0).to(tl.float32)
    e = tl.exp(tl.minimum(x, 20.0))
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - 0.25 * e)))  # log(1 + e) would lose its digits
    softplus = tl.where(x > 20.0, x, tl.where(e < 0.01, small, tl.log(1.0 + e)))
    rate = tl.exp(tl.load(a_log + i, mask=mask, other=0.0).to(tl.float32))
    tl.store(decay + token * HEADS + i, -rate * softplus, mask=mask)
    y = tl.load(b + token * b_stride + i, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-y))
    tl.store(beta + token * HEADS + i, sigmoid.to(beta.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["gate_stride"])
def gated_norm_kernel(
    x,  # [T, HEADS, DIM]
    gate,  # [T, HEADS * DIM], rows `gate_stride` apart
    weight,  # [DIM]
    out,  # [T, HEADS * DIM]
    eps,
    gate_stride,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    i = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (head < HEADS) & (i < DIM)
    at = head * DIM + i
    value = tl.load(x + token * (HEADS * DIM) + at, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / DIM + eps)
    normed = (value * inverse[:, None]).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + i, mask=i < DIM, other=0.0).to(tl.float32)
    scaled = (w * normed).to(out.dtype.element_ty).to(tl.float32)
    z = tl.load(gate + token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    gated = scaled * (z / (1.0 + tl.exp(-z)))
    tl.store(out + token * (HEADS * DIM) + at, gated.to(out.dtype.element_ty), mask=mask)
