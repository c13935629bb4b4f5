"""megatron-core's configuration of a model, with what it has no fields for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class GptConfig(TransformerConfig):
    post_norms: bool = False  # behind attention and MLP too
    # Megatron's attention multiplies cosine and sine by 1 + 0.1 * yarn_mscale * log of this factor.
    yarn_rotary_scaling_factor: float = math.e
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0


def yarn_mscale(attention_factor: float) -> float:
    """What makes it multiply by `attention_factor`."""
    return 10.0 * (attention_factor - 1.0)
