"""Elementwise chains fused into single kernels by torch.compile on a GPU; plain torch on a CPU.

Between its matmuls an unfused layer reads and writes its activations many times. Activations that
are cheap to recompute are not saved; saving them would take a third of a layer's memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from slime.utils.compiled import compiled_on_gpu


def swiglu_down(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return (silu(gate) * up) @ weight.T; silu(gate) * up is recomputed in the backward pass."""
    return _SwigluDown.apply(gate, up, weight)


@compiled_on_gpu
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@compiled_on_gpu
def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the halves of the last dimension: (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@compiled_on_gpu
def _swiglu_gradients(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up, recomputed, and the gradients in gate and in up."""
    sigmoid = torch.sigmoid(gate.float())
    silu = gate.float() * sigmoid
    grad_gate = grad.float() * up.float() * sigmoid * (1 + gate.float() * (1 - sigmoid))
    product = (silu * up.float()).to(gate.dtype)
    return product, grad_gate.to(gate.dtype), (grad.float() * silu).to(up.dtype)


class _SwigluDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(swiglu(gate, up), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        gate, up, weight = ctx.saved_tensors
        product, grad_gate, grad_up = _swiglu_gradients(gate, up, grad @ weight)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = grad.flatten(0, -2).t() @ product.flatten(0, -2)
        return grad_gate, grad_up, grad_weight
