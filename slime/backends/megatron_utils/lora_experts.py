"""LoRA adapters of MoE experts: one matrix per expert in a parameter, or one that all experts share.

Matrices of this rank's experts, beside the experts in `GroupedExperts.lora`; W is sharded over the
expert-tensor ranks::

    gate_up_proj.lora_A  [E, rank, H]         shared outer: [rank, H]
    gate_up_proj.lora_B  [E, 2, W, rank]
    down_proj.lora_A     [E, rank, W]
    down_proj.lora_B     [E, H, rank]         shared outer: [H, rank]

Expert-tensor ranks have the same tokens, and megatron-core's dispatcher sums their outputs and the
gradients of their inputs. So nothing is exchanged for activations, and a matrix that these ranks
replicate gets a part of its gradient on each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

from slime.backends.kernels.grouped_linear import Groups, grouped_linear
from slime.backends.megatron_utils.mlp import GroupedExperts
from slime.backends.megatron_utils.parallel import expert_group, expert_tensor_group
from slime.config.lora import LoraConfig
from slime.config.peft_files import GATE_UP
from slime.core.errors import ConfigError


class ExpertAdapter(nn.Module):
    """The adapter of one parameter of the experts: scaling * B A x for each token of each expert."""

    def __init__(self, lora: LoraConfig, leaf: str, weights: list[torch.Tensor]) -> None:
        super().__init__()
        rows, columns = weights[0].shape
        is_first, shared = leaf == GATE_UP, lora.experts_shared_outer
        a, b = (lora.rank, columns), (2, rows // 2, lora.rank) if is_first else (rows, lora.rank)
        count, device = len(weights), weights[0].device
        self.lora_A = _matrices(a if shared and is_first else (count, *a), device)
        self.lora_B = _matrices(b if shared and not is_first else (count, *b), device)
        self._scaling = lora.scaling
        for matrices, sharded in ((self.lora_A, not is_first), (self.lora_B, is_first)):
            _mark(matrices, sharded=sharded)

    def forward(self, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        low = self._apply(self.lora_A, x, groups)
        return self._apply(self.lora_B, low, groups) * self._scaling

    def _apply(self, matrices: Any, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        if matrices.ndim == 2:
            return F.linear(x, matrices.to(x.dtype))
        if matrices.summed_over_expert_tensor_ranks:
            matrices = mappings.copy_to_tensor_model_parallel_region(
                matrices, expert_tensor_group()
            )
        each = matrices.flatten(1, -2).to(x.dtype)  # [E, out, in]
        return grouped_linear(x, groups, each.unbind())


class ExpertAdapters(nn.ModuleDict):
    """The adapters of one layer's experts, by Hugging Face's names of the two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled, self.is_training_pass, self.was_called = True, False, False

    def forward(self, leaf: str, x: torch.Tensor, groups: Groups) -> torch.Tensor | None:
        """Return what is added to the output of the first or the second linear layers."""
        if leaf not in self or not self.enabled:
            return None
        self.was_called = True
        return self[leaf](x, groups)


def adapt_experts(experts: nn.Module, leaf: str, lora: LoraConfig) -> None:
    """Add the adapter of one parameter to the experts of a layer."""
    if not isinstance(experts, GroupedExperts):
        raise ConfigError(
            f"--lora-target-modules: adapters of experts are not supported in {type(experts).__name__}: "
            "add --transformer-impl local, or name other modules"
        )
    if experts.lora is None:
        experts.lora = ExpertAdapters()
    experts.lora[leaf] = ExpertAdapter(lora, leaf, experts.weights(leaf))


def _matrices(shape: tuple[int, ...], device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))


def _mark(matrices: Any, *, sharded: bool) -> None:
    """Tell Megatron over which ranks gradients are summed and which ranks count in their norm.

    A matrix that all experts share is like the weight of a norm: every rank has it, and a part of its
    gradient. Others are sharded like experts, or have equal values on the expert-tensor ranks.
    """
    shared = matrices.ndim == 2
    set_tensor_model_parallel_attributes(matrices, not shared, -1, 1)
    matrices.sequence_parallel = shared  # tensor parallelism with experts requires it
    matrices.allreduce = shared or expert_group().size() == 1
    replicated = not (shared or sharded) and expert_tensor_group().size() > 1
    matrices.summed_over_expert_tensor_ranks = replicated
    matrices.shared = replicated and expert_tensor_group().rank() > 0  # not counted in the norm
