"""Dense MLPs and MoE experts that save fewer activations for the backward pass.

Experts are computed together by grouped matmuls. Their names, checkpoints and sharding are those of
megatron-core's SequentialMLP, which computes them one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP

from slime.backends.kernels.fused_ops import swiglu
from slime.backends.kernels.grouped_linear import Groups, expert_rows, grouped_linear, make_groups
from slime.backends.megatron_utils.parallel import all_layers
from slime.config.peft_files import DOWN, GATE_UP
from slime.utils.compiled import compiled_on_gpu

if TYPE_CHECKING:
    from slime.backends.megatron_utils.lora_experts import ExpertAdapters

_LINEAR = {GATE_UP: "linear_fc1", DOWN: "linear_fc2"}


def use_gated_mlps(model: GPTModel) -> None:
    """Turn dense MLPs into `GatedMLP` in place: in layer specs megatron accepts only MLP itself."""
    config = model.config
    plain = config.activation_func_clamp_value is None and not config.add_bias_linear
    if config.gated_linear_unit and config.activation_func is F.silu and plain:
        for layer in all_layers(model):
            if type(layer.mlp) is MLP:
                layer.mlp.__class__ = GatedMLP


class GatedMLP(MLP):
    """Recompute silu(gate) * up in the backward pass from its inputs, which are saved anyway.

    In FP8 the second linear layer saves a quantized copy of it, so nothing is left to discard.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **more)
        both, _ = self.linear_fc1(hidden_states)
        if self.config.fp8 or not torch.is_grad_enabled():
            return self.linear_fc2(_swiglu(both))
        recompute = CheckpointWithoutOutput()
        product = recompute.checkpoint(_swiglu, both)
        output, bias = self.linear_fc2(product)
        recompute.discard_output_and_register_recompute(output)
        return output, bias


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    return swiglu(*both.chunk(2, dim=-1))


class GroupedExperts(SequentialMLP):
    """Replace `experts` in the spec of a MoE layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lora: ExpertAdapters | None = None
        self.local_experts = _ReversedModuleList(self.local_experts)
        for linear in self._linears("linear_fc2"):
            if linear.bias is not None:
                # Megatron would sum the gradients of different experts over the tensor ranks.
                linear.bias.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue] - its mark

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,  # [T, H], sorted by expert
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,  # [T]
    ) -> tuple[torch.Tensor, None]:
        hidden, probs = permuted_local_hidden_states, permuted_probs
        sizes = tokens_per_expert.tolist()
        if len(hidden) == 0:  # one dummy token, so that weights get zero gradients
            hidden, probs = F.pad(hidden, (0, 0, 0, 1)), F.pad(probs, (0, 1))
            sizes[0] = 1
        if self.config.moe_apply_probs_on_input:  # top-1 routing only
            hidden, probs = (hidden * probs[:, None]).to(hidden.dtype), torch.ones_like(probs)
        output = self._compute(hidden, make_groups(sizes, hidden.device), probs)
        return output[: len(permuted_local_hidden_states)], None

    def _compute(self, hidden: torch.Tensor, groups: Groups, probs: torch.Tensor) -> torch.Tensor:
        both = self._project(GATE_UP, hidden, groups)
        if biases := self._biases("linear_fc1"):
            both = both + expert_rows(groups, biases)
        output = self._second(both, probs, groups)
        if biases := self._biases("linear_fc2"):
            rows = expert_rows(groups, biases)
            output = output + (rows * probs[:, None]).to(output.dtype)
        return output

    def _linears(self, name: str) -> list[_Linear]:
        return [getattr(expert, name) for expert in self.local_experts]

    def _biases(self, name: str) -> list[torch.Tensor]:
        return [linear.bias for linear in self._linears(name) if linear.bias is not None]

    def weights(self, leaf: str) -> list[torch.Tensor]:
        """Return what Hugging Face holds in one parameter of this name."""
        return [linear.weight for linear in self._linears(_LINEAR[leaf])]

    def _project(self, leaf: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        output = grouped_linear(x, groups, self.weights(leaf))
        added = None if self.lora is None else self.lora(leaf, x, groups)
        return output if added is None else output + added

    def _second(self, both: torch.Tensor, probs: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Apply the second linear layers; recompute their input in the backward pass."""
        if not torch.is_grad_enabled():
            return self._project(DOWN, self._activate(both, probs), groups)
        recompute = CheckpointWithoutOutput()
        product = recompute.checkpoint(self._activate, both, probs)
        output = self._project(DOWN, product, groups)
        recompute.discard_output_and_register_recompute(output)
        return output

    def _activate(self, both: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        config = self.config
        limit = config.activation_func_clamp_value
        return _gated(both, probs, config.activation_func, limit, config.glu_linear_offset)


@compiled_on_gpu
def _gated(
    both: torch.Tensor,  # [T, 2 * F], gate and up side by side
    scale: torch.Tensor,  # [T]
    activation: Callable[[torch.Tensor], torch.Tensor],
    limit: float | None,
    offset: float,
) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (activation(gate) * (up + offset) * scale[:, None]).to(both.dtype)


class _Linear(Protocol):
    weight: torch.Tensor
    bias: torch.Tensor | None


class _ReversedModuleList(torch.nn.ModuleList):
    """Register modules from last to first, but iterate from first to last.

    Megatron's buffers hold parameters in reverse order, so there the experts run first to last.
    """

    def __init__(self, modules: torch.nn.ModuleList) -> None:
        super().__init__()
        for number in reversed(range(len(modules))):
            self.add_module(str(number), modules[number])

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (self.get_submodule(str(number)) for number in range(len(self._modules)))
