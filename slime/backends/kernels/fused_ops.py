"""Elementwise chains as single kernels (torch.compile on a GPU, plain torch on a CPU), also for Hugging Face layers.

Between its matmuls an unfused layer reads and writes its activations many times. Activations that
are cheap to recompute are not saved; saving them would take a third of a layer's memory. Hugging
Face's RMSNorm takes seven memory passes each way; `fuse_norms` replaces it by torch's fused one on
every device. SwiGLU and RoPE of Hugging Face layers are fused on a GPU only.
Weights in FP8 are dequantized for a matmul and once more in its backward pass.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slime.config.peft_files import GATE_UP
from slime.utils.compiled import compiled_on_gpu
from slime.weights.fp8 import FP8, dequantize
from slime.weights.fp8_format import Fp8Format

SCALE = "_scale_inv"  # after the name of a parameter that is held in FP8

Norm = Callable[[torch.Tensor, torch.Tensor, float | None], torch.Tensor]
_ROPE_FUNCTION = "apply_rotary_pos_emb"
_PARTS = ("gate_proj", "up_proj", "down_proj")


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


def fuse_norms(hf: nn.Module) -> int:
    """Patch the forward of every module that computes w * x / rms(x), or (1 + w); return the count.

    A class is patched only if one of its modules matches one of these formulas on random input, since
    families differ.
    """
    norms: dict[type[nn.Module], Norm | None] = {}
    count = 0
    for module in hf.modules():
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm") or _eps(module) is None:
            continue
        if kind not in norms:
            norms[kind] = _find_norm(module)
        norm = norms[kind]
        if norm is not None:
            module.forward = partial(_fused_norm, module, norm)
            count += 1
    return count


def _fused_norm(module: Any, norm: Norm, hidden_states: torch.Tensor) -> torch.Tensor:
    """Read the weight at each call, since FSDP replaces it by the unsharded one."""
    return norm(hidden_states, module.weight, _eps(module))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@compiled_on_gpu
def zero_centered_norm(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Return RMSNorm with a weight that is stored minus one."""
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _find_norm(module: nn.Module) -> Norm | None:
    """Return the norm function that gives the module's output on a random input; None if none does."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module).to_empty(device="cpu").to(torch.float32)
    with torch.no_grad():
        scale = torch.randn(weight.shape, generator=generator)
        probe.get_parameter("weight").copy_(scale)
        x = torch.randn(3, *weight.shape, generator=generator)
        try:
            found = probe(x)
        except TypeError:  # its forward has more arguments (a gate)
            return None
        for norm in (rms_norm, zero_centered_norm):
            if torch.allclose(found, norm(x, scale, _eps(module)), rtol=1e-4, atol=1e-5):
                return norm
    return None


def fuse_mlps(hf: nn.Module) -> int:
    """Patch forward of modules that compute down(silu(gate(x)) * up(x)); return their number."""
    count = 0
    for module in hf.modules():
        parts = [getattr(module, name, None) for name in _PARTS]
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(_PARTS) and _is_plain(module, linears[2]):
            module.forward = partial(_fused_mlp, *linears)
            count += 1
    return count


def fuse_rope(hf: nn.Module) -> bool:
    """Compile the RoPE function in this model's Python module; return whether there is one."""
    modeling = sys.modules[type(hf).__module__]
    function = getattr(modeling, _ROPE_FUNCTION, None)
    if function is None:
        return False
    if not hasattr(function, "__wrapped__"):
        setattr(modeling, _ROPE_FUNCTION, compiled_on_gpu(function))
    return True


def _is_plain(module: nn.Module, down: nn.Linear) -> bool:
    """Return whether the module has only the three matmuls and a SiLU."""
    others = [name for name, _ in module.named_children() if name not in (*_PARTS, "act_fn")]
    silu: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "act_fn", None)
    if others or silu is None or not callable(silu) or down.bias is not None:
        return False
    probe = torch.linspace(-3, 3, 7)
    return torch.allclose(silu(probe), nn.functional.silu(probe))


def _fused_mlp(
    gate: nn.Linear, up: nn.Linear, down: nn.Linear, hidden_states: torch.Tensor
) -> torch.Tensor:
    return swiglu_down(gate(hidden_states), up(hidden_states), down.weight)


def base_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return W x + b of a layer whose weight may be held in FP8."""
    if not hasattr(layer, "weight" + SCALE):
        return F.linear(x, layer.weight, layer.bias)
    out = fp8_matmul(layer, "weight", x)
    return out if layer.bias is None else out + layer.bias


def fp8_matmul(
    module: Any, leaf: str, x: torch.Tensor, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T; with `ends`, the end offsets of the experts' rows, with one W per expert."""
    scale = getattr(module, leaf + SCALE)
    return _Fp8Matmul.apply(x, getattr(module, leaf), scale, module.fp8, leaf == GATE_UP, ends)


class _Fp8Matmul(torch.autograd.Function):
    """Saves the packed parameter: FSDP frees its memory and refills it before the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        layout: Fp8Format,
        halves: bool,
        ends: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scale, ends)
        ctx.layout, ctx.halves = layout, halves
        weight = unpacked(packed, scale, layout, halves=halves)
        if ends is None:
            return F.linear(x, weight)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed, scale, ends = ctx.saved_tensors
        weight = unpacked(packed, scale, ctx.layout, halves=ctx.halves)
        if ends is None:
            grad_x = grad @ weight
        else:
            grad_x = F.grouped_mm(grad.contiguous(), weight, offs=ends)
        return grad_x, None, None, None, None, None


def unpacked(
    packed: torch.Tensor, scale: torch.Tensor, layout: Fp8Format, *, halves: bool
) -> torch.Tensor:
    """Dequantize to the dtype of `packed`; with `halves`, gate and up have separate blocks."""
    values = packed.view(FP8)
    if not halves:
        return dequantize(values, scale, layout).to(packed.dtype)
    values, scale = (part.unflatten(-2, (2, -1)) for part in (values, scale))
    return dequantize(values, scale, layout).to(packed.dtype).flatten(-3, -2)
