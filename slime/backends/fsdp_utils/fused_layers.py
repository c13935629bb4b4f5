"""Fused SwiGLU and RoPE kernels for Hugging Face layers, on a GPU only."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from slime.backends.kernels.fused_ops import swiglu_down
from slime.utils.compiled import compiled_on_gpu

_ROTATION = "apply_rotary_pos_emb"
_PARTS = ("gate_proj", "up_proj", "down_proj")


def fuse_mlps(hf: nn.Module) -> int:
    """Patch forward of modules that compute down(silu(gate(x)) * up(x)); return their number."""
    count = 0
    for module in hf.modules():
        parts = [getattr(module, name, None) for name in _PARTS]
        linears = [part for part in parts if type(part) is nn.Linear]
        if len(linears) == len(_PARTS) and _is_plain(module, linears[2]):
            module.forward = _Fused(*linears)
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


class _Fused:
    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        self._gate, self._up, self._down = gate, up, down

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate(hidden_states), self._up(hidden_states)
        return swiglu_down(gate, up, self._down.weight)
