"""Latent attention (DeepSeek-V3) where TransformerEngine is missing.

megatron-core's own layers cut the projections to the latents over the tensor ranks. Each rank then uses the
whole key of the positions for its heads, but gets back only its own share of the gradient. Held whole by
every rank, as TransformerEngine's are, the gradients are added up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig


class LatentProjection(torch.nn.Module):
    """A linear map that every tensor rank holds whole and applies to its part of the sequence."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


def use_latent_projections(attention: Any) -> None:
    """Put them into the spec of a layer's attention.

    Version 0.16.1 takes its own stand-ins for TransformerEngine's classes, which are no classes; and it
    knows a module that is not cut by the name Linear.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = LatentProjection
    attention.linear_q_down_proj = attention.linear_kv_down_proj = LatentProjection
