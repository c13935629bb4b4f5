"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import attention, mlp
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qkv_bias=True), *mlp()]
