"""A layer with norms after attention and MLP too, before each is added to the residual (GLM4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer


class PostNormLayer(TransformerLayer):
    """Normalize outputs by `post_norm`, a module given in the params of a layer spec."""

    def __init__(self, *args: Any, post_norm: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_self_attn_layernorm = self._norm(post_norm)
        self.post_mlp_layernorm = self._norm(post_norm)
        self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)

    def _norm(self, module: Any) -> torch.nn.Module:
        config = self.config
        norm = build_module(
            module, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        return cast(torch.nn.Module, norm)


def _after(norm: torch.nn.Module, add: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's bias-dropout-add so that it normalizes the output first."""

    def prepare(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add_to_residual = add(training, fused)

        def run(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_with_bias
            output = norm(output if bias is None else output + bias)
            return add_to_residual((output, None), residual, dropout)

        return run

    return prepare
