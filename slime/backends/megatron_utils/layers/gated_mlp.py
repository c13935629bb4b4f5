"""A dense MLP that saves fewer activations for its backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP

from slime.backends.kernels.fused_ops import swiglu
from slime.backends.megatron_utils.parallel import decoder_layers


def use_gated_mlps(model: GPTModel) -> None:
    """Turn dense MLPs into `GatedMLP` in place: in layer specs megatron accepts only MLP itself."""
    config = model.config
    plain = config.activation_func_clamp_value is None and not config.add_bias_linear
    if config.gated_linear_unit and config.activation_func is F.silu and plain:
        for layer in decoder_layers(model):
            if type(layer.mlp) is MLP:
                layer.mlp.__class__ = GatedMLP


class GatedMLP(MLP):
    """Recompute silu(gate) * up in the backward pass from its inputs, which are saved anyway."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if per_token_scale is not None or not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **more)
        both, _ = self.linear_fc1(hidden_states)
        kept = CheckpointWithoutOutput()
        product = kept.checkpoint(_swiglu, both)
        output, bias = self.linear_fc2(product)
        kept.discard_output_and_register_recompute(output)
        return output, bias


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    return swiglu(*both.chunk(2, dim=-1))
