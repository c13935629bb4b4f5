"""Qwen3-MoE: Qwen3 with experts, in all layers or some."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import attention, experts, mlp
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qk_norm=True), *mlp(), *experts()]
