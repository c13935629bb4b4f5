"""GLM-4.5: dense layers first, then experts with a shared one; further-token layers behind the last."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import (
    attention,
    expert_bias,
    experts,
    layers_behind_the_last,
    mlp,
    shared_experts,
)
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [
        *attention(config, qkv_bias=bool(config.attention_bias), qk_norm=bool(config.use_qk_norm)),
        *mlp(),
        *expert_bias(),
        *experts(),
        *shared_experts(),
    ]


def untrained(config: PretrainedConfig) -> tuple[str, ...]:
    return layers_behind_the_last(config)
