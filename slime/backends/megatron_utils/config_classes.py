"""megatron-core's config classes: the fields that flags set, and a subclass with missing fields."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.transformer_config import TransformerConfig

from slime.config.flags.registry import all_flags

if TYPE_CHECKING:
    from slime.config.arguments import Args


def flag_fields(args: Args, config_class: type) -> dict[str, Any]:
    """Return fields that the user or a rule set, without defaults: {"lr": 1e-6, ...}."""
    known = {field.name for field in dataclasses.fields(config_class)}
    fields = {}
    for flag in all_flags().values():
        value = getattr(args, flag.name)
        if not flag.sets or value is None or args.origin(flag.name) == "default":
            continue
        for target in flag.sets:
            owner, field = target.split(".")
            if owner == config_class.__name__ and field in known:
                fields[field] = value
    return fields


@dataclass
class GptConfig(TransformerConfig):
    post_norms: bool = False  # norms after attention and MLP too
    # Megatron's attention multiplies cosine and sine by 1 + 0.1 * yarn_mscale * log of this factor.
    yarn_rotary_scaling_factor: float = math.e
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0


def yarn_mscale(attention_factor: float) -> float:
    """Return the `yarn_mscale` with which Megatron scales cosine and sine by `attention_factor`."""
    return 10.0 * (attention_factor - 1.0)
