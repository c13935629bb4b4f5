"""Llama 1, 2, 3 and 3.1."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import attention, mlp
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config), *mlp()]
