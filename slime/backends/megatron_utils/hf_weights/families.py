"""The weight map of each model type: a `Family` holds the rules of its layers.

To add a family, add its entry to `_FAMILIES` (rules that need mappings of their own go into a
module beside this one, as `gpt_oss.py` does) and its configuration to `architecture.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from slime.backends.megatron_utils.architecture import architecture
from slime.backends.megatron_utils.hf_weights import deepseek_v3, gpt_oss
from slime.backends.megatron_utils.hf_weights.blocks import (
    H,
    M,
    attention,
    ends,
    expert_bias,
    experts,
    layers_behind_the_last,
    mlp,
    plain,
    shared_experts,
)
from slime.backends.megatron_utils.hf_weights.mappings import GateUp
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap
from slime.backends.megatron_utils.model_config import padded_vocab_size

if TYPE_CHECKING:
    from slime.config.arguments import Args


def weight_map(config: PretrainedConfig, args: Args) -> WeightMap:
    """Return the rules of a model; raise UserError for a model type that is not supported."""
    return padded_weight_map(config, padded_vocab_size(config.vocab_size, args))


def padded_weight_map(config: PretrainedConfig, padded_vocab: int) -> WeightMap:
    """Return the rules of a model whose embedding is padded to `padded_vocab` rows."""
    architecture(config)  # UserError, with the supported model types, for any other
    family = _FAMILIES[config.model_type]
    first, *last = ends(config, padded_vocab)
    return WeightMap(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        rules=(first, *family.layer_rules(config), *last),
        untrained=family.untrained(config),
    )


@dataclass(frozen=True)
class Family:
    """The rules of one layer, and the prefixes of Hugging Face tensors that are not trained."""

    layer_rules: Callable[[PretrainedConfig], list[Rule]]
    untrained: Callable[[PretrainedConfig], tuple[str, ...]] = lambda config: ()


def _llama(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config), *mlp()]


def _qwen2(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qkv_bias=True), *mlp()]


def _qwen3(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qk_norm=True), *mlp()]


def _qwen3_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen3 with MoE in all layers or in some."""
    return [*_qwen3(config), *experts()]


def _mimo(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen2; the multi-token-prediction layers of MiMo are not trained."""
    return [*attention(config, qkv_bias=bool(config.attention_bias)), *mlp()]


def _glm4(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of GLM-4-0414: norms after attention and MLP too, gate and up fused."""
    return [
        *attention(config, qkv_bias=bool(config.attention_bias)),
        plain("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Rule(f"{M}mlp.linear_fc1.weight", (f"{H}mlp.gate_up_proj.weight",), GateUp(fused=True)),
        plain("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
        plain("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
    ]


def _glm4_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of GLM-4.5: dense layers first, then MoE with a shared expert."""
    return [
        *attention(config, qkv_bias=bool(config.attention_bias), qk_norm=bool(config.use_qk_norm)),
        *mlp(),
        *expert_bias(),
        *experts(),
        *shared_experts(),
    ]


_FAMILIES = {
    "llama": Family(_llama),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "mimo": Family(_mimo, untrained=lambda config: ("model.mtp_layers.",)),
    "glm4": Family(_glm4),
    "gpt_oss": Family(gpt_oss.layer_rules),
    "qwen3_moe": Family(_qwen3_moe),
    "glm4_moe": Family(_glm4_moe, untrained=layers_behind_the_last),
    "deepseek_v3": Family(deepseek_v3.layer_rules, untrained=layers_behind_the_last),
}
