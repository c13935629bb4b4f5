"""Fused kernels in place of the RMSNorm, SwiGLU and RoPE code of Hugging Face layers.

Hugging Face's RMSNorm takes seven memory passes each way; torch's fused one replaces it on every
device. SwiGLU and RoPE are fused on a GPU only.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from slime.backends.kernels.fused_ops import swiglu_down
from slime.utils.compiled import compiled_on_gpu


def fuse_norms(hf: nn.Module) -> int:
    """Patch the forward of every module that computes w * x / rms(x); return the count.

    Families differ (Gemma multiplies by 1 + w), so a class is patched only if one of its modules
    returns the same numbers as F.rms_norm on random input.
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
            module.forward = _FusedNorm(module)
            count += 1
    return count


class _FusedNorm:
    """Read the weight at each call, since FSDP replaces it by the unsharded one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = self._module.weight
        assert isinstance(weight, torch.Tensor)
        return F.rms_norm(hidden_states, weight.shape, weight, _eps(self._module))


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
    with torch.no_grad():
        scale = torch.randn(weight.shape, generator=generator)
        probe.get_parameter("weight").copy_(scale)
        x = torch.randn(3, *weight.shape, generator=generator)
        expected = F.rms_norm(x, weight.shape, scale, _eps(module))
        try:
            found = probe(x)
        except TypeError:  # its forward has more arguments (a gate)
            return False
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


_ROTATION = "apply_rotary_pos_emb"
_PARTS = ("gate_proj", "up_proj", "down_proj")


def fuse_mlps(hf: nn.Module) -> int:
    """Patch forward of modules that compute down(silu(gate(x)) * up(x)); return their number."""
    count = 0
    for module in hf.modules():
        parts = [getattr(module, name, None) for name in _PARTS]
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(_PARTS) and _is_plain(module, linears[2]):
            module.forward = _FusedMLP(*linears)
            count += 1
    return count


def fuse_rotation(hf: nn.Module) -> bool:
    """Compile the RoPE function in this model's Python module; return whether there is one."""
    modeling = sys.modules[type(hf).__module__]
    function = getattr(modeling, _ROTATION, None)
    if function is None:
        return False
    if not hasattr(function, "__wrapped__"):
        setattr(modeling, _ROTATION, compiled_on_gpu(function))
    return True


def _is_plain(module: nn.Module, down: nn.Linear) -> bool:
    """Return whether the module has only the three matmuls and a SiLU."""
    others = [name for name, _ in module.named_children() if name not in (*_PARTS, "act_fn")]
    silu: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "act_fn", None)
    if others or silu is None or not callable(silu) or down.bias is not None:
        return False
    probe = torch.linspace(-3, 3, 7)
    return torch.allclose(silu(probe), nn.functional.silu(probe))


class _FusedMLP:
    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self._gate, self._up, self._down = gate, up, down

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate(hidden_states), self._up(hidden_states)
        return swiglu_down(gate, up, self._down.weight)
