"""RMS norm in few passes over memory; Hugging Face's takes seven forward and about as many backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def fuse_norms(hf: nn.Module) -> int:
    """Replace the forward of every module that computes w * x / rms(x); how many there were.

    Families differ in details (Gemma multiplies by 1 + w), so a class is taken only after one of its
    modules has given the same numbers as ours.
    """
    same: dict[type[nn.Module], bool] = {}
    count = 0
    for module in hf.modules():
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm") or _eps(module) is None:
            continue
        if kind not in same:
            same[kind] = _computes_rms_norm(module)
        if same[kind]:
            module.forward = _Fused(module)
            count += 1
    return count


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _Fused:
    """Looks the weight up at each call: FSDP replaces it by the gathered one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self._module.weight, _eps(self._module))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        square_sum = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = square_sum.div_(x.shape[-1]).add_(eps).rsqrt_()  # 1 / rms, one per row
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """dx = r g w - x r^3 sum(g w x) / H;  dw = sum over rows of g x r."""
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        grad_x = (grad * x).reshape(-1, size)
        inverse_column = inverse.reshape(-1)
        grad_weight = torch.mv(grad_x.t(), inverse_column)
        along_x = torch.mv(grad_x, weight).mul_(inverse_column.pow(3)).div_(-size)
        grad_x = torch.mul(grad, weight).mul_(inverse)
        return grad_x.addcmul_(x, along_x.reshape(inverse.shape)), grad_weight, None


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _computes_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module).to_empty(device="cpu").to(torch.float32)
    eps = _eps(module)
    assert eps is not None
    with torch.no_grad():
        probe.weight.copy_(torch.randn(weight.shape, generator=generator))
        x = torch.randn(3, *weight.shape, generator=generator)
        expected = F.rms_norm(x, weight.shape, probe.weight, eps)
        try:
            found = probe(x)
        except TypeError:  # it takes more than the hidden states (a gate)
            return False
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
