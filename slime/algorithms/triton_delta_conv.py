"""The causal convolution of packed gated delta nets in Triton, with the activation and normalization after it.

    pre = convolution of x      act = silu(pre)      query, key = act / |act| (query times 1 / sqrt(dim))      value = act

Query, key and value are written as contiguous tensors for the delta rule. The backward pass recomputes pre and act
from x, so that only x is saved. It has two kernels, since the gradient of a token's x needs the gradients of
pre of the tokens after it. Sums are in fp32; pre and act are rounded to the dtype of x, as in Hugging Face.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from slime.algorithms.gated_delta import NORM_EPS, DeltaHeads

_TOKENS = 32  # of a program
_COLUMNS = 128  # of a program of shift_kernel


def conv_heads(
    x: torch.Tensor,  # [T, sum of heads.widths]
    weight: torch.Tensor,  # [sum of heads.widths, K]
    positions: torch.Tensor,  # [T] int32, index of each token within its sample
    heads: DeltaHeads,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query and key [T, key heads, key dim], normalized, query scaled; value [T, value heads, value dim]."""
    assert len(positions) == len(x), "lengths of the samples do not add up to the tokens"
    return _ConvHeads.apply(x, weight, positions, heads)  # type: ignore[return-value]


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, heads: DeltaHeads
    ) -> tuple[torch.Tensor, ...]:
        x = x if x.stride(1) == 1 else x.contiguous()  # rows may be a part of wider ones
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight, positions)
        ctx.heads = heads
        key_shape = (len(x), heads.num_key, heads.key_dim)
        query, key = x.new_empty(key_shape), x.new_empty(key_shape)
        value = x.new_empty(len(x), heads.num_value, heads.value_dim)
        conv_kernel[_grid(x, heads)](
            *(x, weight, positions, query, key, value, len(x), x.stride(0)),
            **_options(x, weight, heads),
        )
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, positions = ctx.saved_tensors
        grid, (channels, taps) = _grid(x, ctx.heads), weight.shape
        trained = ctx.needs_input_grad[1]  # a frozen weight has no gradient
        d_pre = x.new_empty(x.shape)
        sums = x.new_empty(grid[0] if trained else 0, taps, channels, dtype=torch.float32)
        conv_backward_kernel[grid](
            *(x, weight, positions, *(grad.contiguous() for grad in grads), d_pre, sums),
            *(len(x), x.stride(0)),
            WEIGHT_GRAD=trained,
            **_options(x, weight, ctx.heads),
        )
        d_x = torch.empty_like(d_pre)
        shift_kernel[(grid[0], triton.cdiv(channels, _COLUMNS))](
            *(d_pre, weight, positions, d_x, len(x), channels),
            TAPS=taps,
            BLOCK_T=_TOKENS,
            BLOCK_C=_COLUMNS,
        )
        d_weight = sums.sum(0).t().to(weight.dtype) if trained else None
        return d_x, d_weight, None, None


def _grid(x: torch.Tensor, heads: DeltaHeads) -> tuple[int, int]:
    return -(-len(x) // _TOKENS), 2 * heads.num_key + heads.num_value


def _options(x: torch.Tensor, weight: torch.Tensor, heads: DeltaHeads) -> dict[str, Any]:
    return {
        "KEY_HEADS": heads.num_key,
        "HEADS": heads.num_value,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "TAPS": weight.shape[1],
        "EPS": NORM_EPS,
        "BLOCK_T": _TOKENS,
        "BLOCK_D": triton.next_power_of_2(max(heads.key_dim, heads.value_dim)),
    }


@triton.jit
def _columns_of(head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return the first channel of a head and its dimension; heads of queries come first, then keys, values."""
    before = tl.maximum(head - 2 * KEY_HEADS, 0)
    first = tl.minimum(head, 2 * KEY_HEADS) * KEY_DIM + before * VALUE_DIM
    return first, tl.where(head < 2 * KEY_HEADS, KEY_DIM, VALUE_DIM)


@triton.jit
def _tap(
    x, weight, token, position, inside, channel, in_head, tokens, x_stride, back, TAPS: tl.constexpr
):
    """Return x of the tokens `back` places before, 0 before the start of a sample, and its weight."""
    real = (inside & (position >= back))[:, None] & in_head[None, :]
    before = tl.load(
        x + (token - back)[:, None] * x_stride + channel[None, :], mask=real, other=0.0
    )
    factor = tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=in_head, other=0.0)
    return before.to(tl.float32), factor.to(tl.float32)


@triton.jit
def _convolved(
    x, weight, token, position, inside, channel, in_head, tokens, x_stride,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return pre, rounded, its sigmoid, and act, rounded."""
    kind = x.dtype.element_ty
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for back in tl.static_range(TAPS):
        before, factor = _tap(
            x, weight, token, position, inside, channel, in_head, tokens, x_stride, back, TAPS
        )
        total += before * factor[None, :]
    pre = total.to(kind).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-pre))
    return pre, gate, (pre * gate).to(kind).to(tl.float32)


@triton.jit
def conv_kernel(
    x,  # [tokens, channels], rows of x_stride
    weight,  # [channels, TAPS]
    positions,  # [tokens]
    query, key, value,  # out
    tokens, x_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, EPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    first, dim = _columns_of(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    d = tl.arange(0, BLOCK_D)
    in_head = d < dim
    position = tl.load(positions + token, mask=inside, other=0)
    _, _, act = _convolved(
        x, weight, token, position, inside, first + d, in_head, tokens, x_stride,
        TAPS, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    real = inside[:, None] & in_head[None, :]
    if head < 2 * KEY_HEADS:
        act *= tl.rsqrt(tl.sum(act * act, 1) + EPS)[:, None]
        if head < KEY_HEADS:
            act *= KEY_DIM**-0.5
            at = query + (token[:, None] * KEY_HEADS + head) * KEY_DIM + d[None, :]
        else:
            at = key + (token[:, None] * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + d[None, :]
    else:
        at = value + (token[:, None] * HEADS + head - 2 * KEY_HEADS) * VALUE_DIM + d[None, :]
    tl.store(at, act.to(x.dtype.element_ty), mask=real)


@triton.jit
def conv_backward_kernel(
    x, weight, positions,
    d_query, d_key, d_value,
    d_pre,  # [tokens, channels] out
    sums,  # [programs, TAPS, channels] out: gradient of the weight, from the tokens of a program
    tokens, x_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, EPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < tokens
    first, dim = _columns_of(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    d = tl.arange(0, BLOCK_D)
    in_head, channel = d < dim, first + d
    position = tl.load(positions + token, mask=inside, other=0)
    pre, gate, act = _convolved(
        x, weight, token, position, inside, channel, in_head, tokens, x_stride,
        TAPS, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    real = inside[:, None] & in_head[None, :]
    if head < KEY_HEADS:
        at = d_query + (token[:, None] * KEY_HEADS + head) * KEY_DIM + d[None, :]
    elif head < 2 * KEY_HEADS:
        at = d_key + (token[:, None] * KEY_HEADS + head - KEY_HEADS) * KEY_DIM + d[None, :]
    else:
        at = d_value + (token[:, None] * HEADS + head - 2 * KEY_HEADS) * VALUE_DIM + d[None, :]
    grad = tl.load(at, mask=real, other=0.0).to(tl.float32)
    if head < 2 * KEY_HEADS:
        if head < KEY_HEADS:
            grad *= KEY_DIM**-0.5
        inverse = tl.rsqrt(tl.sum(act * act, 1) + EPS)
        along = tl.sum(grad * act, 1) * inverse * inverse
        grad = (grad - act * along[:, None]) * inverse[:, None]
    grad *= gate * (1.0 + pre * (1.0 - gate))
    channels = KEY_HEADS * KEY_DIM * 2 + HEADS * VALUE_DIM
    tl.store(
        d_pre + token[:, None] * channels + channel[None, :],
        grad.to(d_pre.dtype.element_ty),
        mask=real,
    )
    if WEIGHT_GRAD:
        for back in tl.static_range(TAPS):
            before, _ = _tap(
                x, weight, token, position, inside, channel, in_head, tokens, x_stride, back, TAPS
            )
            at_sum = (tl.program_id(0) * TAPS + TAPS - 1 - back) * channels + channel
            tl.store(sums + at_sum, tl.sum(grad * before, 0), mask=in_head)


@triton.jit
def shift_kernel(
    d_pre, weight, positions,
    d_x,  # [tokens, channels] out
    tokens, channels,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = channel < channels
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for after in tl.static_range(TAPS):
        later = token + after
        position = tl.load(positions + later, mask=later < tokens, other=-1)
        same = position >= after  # else that token belongs to another sample
        at = d_pre + later[:, None] * channels + channel[None, :]
        grad = tl.load(at, mask=same[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + (TAPS - 1 - after), mask=in_row, other=0.0)
        total += grad * factor.to(tl.float32)[None, :]
    real = (token < tokens)[:, None] & in_row[None, :]
    at = d_x + token[:, None] * channels + channel[None, :]
    tl.store(at, total.to(d_x.dtype.element_ty), mask=real)
