"""torch's fused RMSNorm in place of Hugging Face's, which takes seven memory passes each way."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn


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
            module.forward = _Fused(module)
            count += 1
    return count


class _Fused:
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
