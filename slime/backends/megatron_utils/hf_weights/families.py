"""Which map a model has."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from slime.backends.megatron_utils.architecture import architecture
from slime.backends.megatron_utils.hf_weights import (
    deepseek_v3,
    glm4,
    glm4_moe,
    gpt_oss,
    llama,
    mimo,
    qwen2,
    qwen3,
    qwen3_moe,
)
from slime.backends.megatron_utils.hf_weights.blocks import ends
from slime.backends.megatron_utils.hf_weights.rules import WeightMap
from slime.backends.megatron_utils.model_config import padded_vocab_size

if TYPE_CHECKING:
    from slime.config.arguments import Args


def weight_map(config: PretrainedConfig, args: Args) -> WeightMap:
    """UserError for a model the backend does not know."""
    return padded_weight_map(config, padded_vocab_size(config.vocab_size, args))


def padded_weight_map(config: PretrainedConfig, padded_vocab: int) -> WeightMap:
    """The same for a given number of rows of the embedding."""
    family = family_of(config)
    first, *last = ends(config, padded_vocab)
    untrained = family.untrained(config) if hasattr(family, "untrained") else ()
    return WeightMap(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        rules=(first, *family.layer_rules(config), *last),
        untrained=untrained,
    )


def family_of(config: PretrainedConfig) -> ModuleType:
    """The module with a family's rules; UserError, with the list of those known, for any other."""
    architecture(config)
    return _FAMILIES[config.model_type]


_FAMILIES = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mimo": mimo,
    "glm4": glm4,
    "gpt_oss": gpt_oss,
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
}
