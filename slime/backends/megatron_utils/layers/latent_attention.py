"""Multi-head latent attention (MLA, DeepSeek-V3) without TransformerEngine.

megatron-core's own layers shard the down projections over the tensor ranks. Each rank then uses the
full RoPE key for its heads, but gets only its own share of the gradient. Here, as in
TransformerEngine, the projections are replicated and their gradients summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import TransformerConfig


class LatentProjection(torch.nn.Module):
    """A linear layer replicated on all tensor ranks, each applying it to its sequence shard."""

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
    """Put `LatentProjection` into the spec of a layer's attention.

    megatron-core 0.16.1 takes its placeholders of TransformerEngine's classes for classes, and
    accepts an unsharded module only as `Linear`.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = LatentProjection
    attention.linear_q_down_proj = attention.linear_kv_down_proj = LatentProjection
