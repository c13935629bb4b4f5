"""LoRA adapters of MoE experts, which transformers holds in two 3-D parameters per layer.

The parameters keep their names and get adapters beside them, one matrix per expert, so that FSDP
shards weights and adapters alike, by experts::

    mlp.experts.gate_up_proj                     [E, 2 W, H]      frozen
    mlp.experts.lora.gate_up_proj.lora_A.weight  [E, rank, H]     with a shared outer matrix [rank, H]
    mlp.experts.lora.gate_up_proj.lora_B.weight  [E, 2 W, rank]
    mlp.experts.lora.down_proj.lora_A.weight     [E, rank, W]
    mlp.experts.lora.down_proj.lora_B.weight     [E, H, rank]     with a shared outer matrix [H, rank]
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slime.backends.fsdp_utils.fp8_base import matrix_shape
from slime.backends.kernels.fused_ops import SCALE, fp8_matmul
from slime.backends.kernels.grouped_linear import Groups, grouped_linear, make_groups
from slime.config.lora import LoraConfig
from slime.config.peft_files import DOWN, EXPERTS, GATE_UP, is_experts
from slime.core.errors import UserError

_CHILD = "lora"  # of the module with the experts


class ExpertMatrices(nn.Module):
    """One matrix per expert, [E, out, in], or one for all experts, [out, in]."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=torch.float32))

    def forward(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Map tokens [T, in], sorted by expert, to [T, out]."""
        if self.weight.ndim == 2:
            return F.linear(x, self.weight)
        return grouped_linear(x, groups, self.weight.unbind())


class ExpertAdapter(nn.Module):
    """The adapter of one parameter of the experts: scaling * B A x for each token of each expert."""

    def __init__(self, experts: nn.Module, leaf: str, config: LoraConfig) -> None:
        super().__init__()
        count, rows, columns = matrix_shape(experts, leaf)
        a, b = [count, config.rank, columns], [count, rows, config.rank]
        if config.experts_shared_outer:
            a, b = (a[1:], b) if leaf == GATE_UP else (a, b[1:])
        device = experts.get_parameter(leaf).device
        self.lora_A = ExpertMatrices(*a, device=device)
        self.lora_B = ExpertMatrices(*b, device=device)
        self.scaling = config.scaling
        self.enabled = True

    def forward(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self.lora_B(self.lora_A(x, groups), groups) * self.scaling


def expert_modules(hf: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose parameters hold all experts of a layer, by parameter name."""
    return {
        f"{name}.{leaf}": module
        for name, module in hf.named_modules()
        for leaf in (GATE_UP, DOWN)
        if is_experts(f"{name}.{leaf}") and isinstance(getattr(module, leaf, None), nn.Parameter)
    }


def adapt_experts(module: Any, leaf: str, config: LoraConfig) -> None:
    """Add an adapter of one parameter and patch the module's forward."""
    if not is_plain(module):
        raise UserError(
            f"--lora-target-modules: {type(module).__name__} has biases, transposed weights or norms, with "
            "which adapters of experts are not supported: name other modules"
        )
    patch_experts(module)
    module.lora[leaf] = ExpertAdapter(module, leaf, config)


def is_plain(module: Any) -> bool:
    """Return whether experts are two matmuls and a gate, without biases, transposed weights or norms."""
    return getattr(module, "has_gate", False) and not (
        getattr(module, "is_transposed", True)
        or getattr(module, "has_bias", True)
        or getattr(module, "has_post_expert_norm", False)
    )


def patch_experts(module: Any) -> None:
    """Make the module compute with adapters and with weights in FP8."""
    if not hasattr(module, _CHILD):
        module.lora = nn.ModuleDict()
        module.forward = _ForwardWithAdapters(module)


@lru_cache(maxsize=1 << 16)  # called for every matrix in every update
def adapter_module(name: str) -> str:
    """Return `...experts.gate_up_proj` for the module of its adapter; other names are returned unchanged."""
    return name.replace(f".{EXPERTS}.{_CHILD}.", f".{EXPERTS}.")


def adapter_path(module: str) -> str:
    """Return the path of a module's adapter, the inverse of `adapter_module`."""
    if not is_experts(module):
        return module
    owner, _, leaf = module.rpartition(".")
    return f"{owner}.{_CHILD}.{leaf}"


class _ForwardWithAdapters:
    """The experts' forward with grouped matmuls, equal to Hugging Face's bit for bit while B is zero.

    It also serves FP8 experts without adapters.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        module = self._module
        in_fp8 = hasattr(module, GATE_UP + SCALE) or hasattr(module, DOWN + SCALE)
        if not in_fp8 and not any(adapter.enabled for adapter in module.lora.values()):
            return type(module).forward(module, hidden_states, top_k_index, top_k_weights)
        top = top_k_index.shape[-1]
        experts, order = torch.sort(top_k_index.reshape(-1))
        sizes = torch.bincount(experts, minlength=module.num_experts).tolist()
        groups = make_groups(sizes, hidden_states.device)
        gate_up = self._project(GATE_UP, hidden_states[order // top], groups)
        out = self._project(DOWN, module._apply_gate(gate_up), groups)
        out = out * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return out[back].view(-1, top, out.shape[-1]).sum(dim=1).to(hidden_states.dtype)

    def _project(self, leaf: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        weight, adapters = getattr(self._module, leaf), self._module.lora
        x = x.to(weight.dtype)
        if hasattr(self._module, leaf + SCALE):
            out = fp8_matmul(self._module, leaf, x, groups.ends)
        else:
            out = F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
        adapted = leaf in adapters and adapters[leaf].enabled
        return out + adapters[leaf](x, groups) if adapted else out
