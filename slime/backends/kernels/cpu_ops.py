"""The operations of cpu_ops.c on contiguous float32 tensors, with their gradients."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.utils.c_library import load_library

_P, _L, _F = c_void_p, c_long, c_float
_SIGNATURES = {
    "add_rms_norm": [_P, _P, _P, _P, _P, _L, _L, _F],
    "add_rms_norm_backward": [_P, _P, _P, _P, _P, _P, _L, _L, _F],
    "silu_mul": [_P, _P, _L, _L],
    "silu_mul_backward": [_P, _P, _P, _L, _L],
    "split_heads": [_P, _P, _L, _L, _L, _L, _P, _P, _P, _P, _F, _P, _P, _P],
    "split_heads_backward": [_P, _P, *[_L] * 4, *[_P] * 4, _F, *[_P] * 6],
    "take_rows": [_P, _P, _P, _L, _L, _P],
}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How a row of query | key | value heads is cut, and the epsilon of their norms."""

    num_query: int
    num_key: int
    dim: int
    eps: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.num_query, self.num_key, self.dim


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """None where it could not be built."""
    library = load_library(Path(__file__).with_name("cpu_ops.c"))
    if library is not None:
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
    return library


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + delta, and weight * s / rms(s) over the last dimension."""
    return _AddRmsNorm.apply(x, delta, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _RmsNorm.apply(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, gate | up]."""
    return _SiluMul.apply(gate_up)


def split_heads(
    qkv: torch.Tensor,  # [T, query | key | value heads]
    norms: tuple[torch.Tensor | None, torch.Tensor | None],  # weights for queries and keys, [dim]
    cosines: torch.Tensor,  # [T, dim]
    sines: torch.Tensor,
    padding: tuple[torch.Tensor, torch.Tensor] | None,  # gather and scatter of a PackedLayout
    heads: Heads,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normed and rotated, and values: [P, heads, dim]."""
    return _SplitHeads.apply(qkv, *norms, cosines, sines, padding, heads)


def drop_padding(x: torch.Tensor, padding: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The T rows of [P, size] that are not padding."""
    return _DropPadding.apply(x, *padding)


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    grad_sum: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    grad_sum = None if grad_sum is None else grad_sum.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    _library().add_rms_norm_backward(
        *map(_at, (x, weight, grad, grad_sum, grad_x, grad_weight)),
        x.numel() // x.shape[-1],
        x.shape[-1],
        eps,
    )
    return grad_x, grad_weight


def _library() -> ctypes.CDLL:
    library = cpu_library()
    assert library is not None
    return library


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        at = map(_at, (x, None, weight, None, out))
        _library().add_rms_norm(*at, x.numel() // size, size, eps)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return *_norm_gradients(x, weight, grads[0], None, ctx.eps), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, delta, weight = x.contiguous(), delta.contiguous(), weight.contiguous()
        total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        at = map(_at, (x, delta, weight, total, out))
        _library().add_rms_norm(*at, x.numel() // size, size, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        total, weight = ctx.saved_tensors
        grad_x, grad_weight = _norm_gradients(total, weight, grads[1], grads[0], ctx.eps)
        return grad_x, grad_x, grad_weight, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        _library().silu_mul(_at(gate_up), _at(out), rows, size)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, grad_gate_up = grads[0].contiguous(), torch.empty_like(gate_up)
        _library().silu_mul_backward(*map(_at, (gate_up, grad, grad_gate_up)), *grad.shape)
        return grad_gate_up


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        padding: tuple[torch.Tensor, torch.Tensor] | None,
        heads: Heads,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv, cosines, sines = qkv.contiguous(), cosines.contiguous(), sines.contiguous()
        gather, scatter = padding or (None, None)
        positions = len(qkv) if gather is None else len(gather)
        query, key, value = (
            qkv.new_empty(positions, count, heads.dim)
            for count in (heads.num_query, heads.num_key, heads.num_key)
        )
        _library().split_heads(
            *map(_at, (qkv, gather)),
            positions,
            *heads.sizes,
            *map(_at, (cosines, sines, query_norm, key_norm)),
            heads.eps,
            *map(_at, (query, key, value)),
        )
        ctx.save_for_backward(qkv, scatter, cosines, sines, query_norm, key_norm)
        ctx.heads = heads
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        qkv, scatter, cosines, sines, *norms = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        grad_qkv = torch.empty_like(qkv)
        grad_norms = [None if norm is None else torch.empty_like(norm) for norm in norms]
        _library().split_heads_backward(
            *map(_at, (qkv, scatter)),
            len(qkv),
            *ctx.heads.sizes,
            *map(_at, (cosines, sines, *norms)),
            ctx.heads.eps,
            *map(_at, (*grads, grad_qkv, *grad_norms)),
        )
        return grad_qkv, *grad_norms, None, None, None, None


class _DropPadding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gather, scatter)
        return _take_rows(x, scatter, None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _take_rows(grads[0], *ctx.saved_tensors), None, None


def _take_rows(x: torch.Tensor, index: torch.Tensor, back: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    out = x.new_empty(len(index), x.shape[1])
    _library().take_rows(*map(_at, (x, index, back)), *out.shape, _at(out))
    return out
