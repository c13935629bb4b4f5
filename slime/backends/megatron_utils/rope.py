"""RoPE parameters of a Hugging Face config.

Frequencies come from transformers' own formulas, so every scaling that does not depend on the
sequence length works. MLA is the exception: it uses megatron-core's formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime.config.checks.model_checks import check_rope
from slime.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE parameters of a model; `frequencies` is None if they follow from the base alone.

    Linear scaling by 4 of a head of 4 with base 1e4: frequencies (0.25, 0.0025).
    """

    base: float
    percent: float = 1.0  # share of a head that RoPE applies to
    kind: str = "default"
    factor: float | None = None  # of RoPE scaling
    frequencies: tuple[float, ...] | None = None
    attention_factor: float = 1.0  # scales cosine and sine
    yarn: dict[str, Any] = field(default_factory=dict)  # megatron-core's fields, for MLA


def read_rope(config: PretrainedConfig, *, latent: bool) -> Rope:
    """Return the RoPE parameters; raise ConfigError for a scaling that is not supported."""
    given = dict(config.rope_parameters)
    kind = given.get("rope_type", "default")
    check_rope(config.model_type, kind)
    base, percent = float(given["rope_theta"]), float(given.get("partial_rotary_factor") or 1.0)
    rope = Rope(base=base, percent=percent, kind=kind)
    if kind == "default":
        return rope
    rope = replace(rope, factor=float(given["factor"]))
    if latent:
        _refuse_unlike_megatron(config, given)
        return replace(rope, yarn=_yarn(config, given))
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return replace(
        rope, frequencies=tuple(frequencies.tolist()), attention_factor=float(factor or 1.0)
    )


def _yarn(config: PretrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "rotary_scaling_factor": float(given["factor"]),
        "original_max_position_embeddings": original,
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": float(given.get("mscale") or 1.0),
        "mscale_all_dim": float(given.get("mscale_all_dim") or 0.0),
    }


def _refuse_unlike_megatron(config: PretrainedConfig, given: dict[str, Any]) -> None:
    """Raise UserError for YaRN options that megatron-core's MLA computes differently."""
    wrong = None
    if not given.get("truncate", True):
        wrong = "truncate false"
    elif given.get("attention_factor") is not None:
        wrong = f"attention_factor {given['attention_factor']}"
    elif bool(given.get("mscale")) != bool(given.get("mscale_all_dim")) and (
        given.get("mscale") != 1.0
    ):
        wrong = "only one of mscale and mscale_all_dim"
    if wrong is not None:
        raise UserError(
            f"config.json of --hf-checkpoint says {wrong} in rope_parameters: the Megatron backend does "
            f"not train {config.model_type} with that. Use --train-backend fsdp"
        )
