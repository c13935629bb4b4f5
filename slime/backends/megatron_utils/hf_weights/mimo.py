"""MiMo: Qwen2 with layers that predict further tokens, which are not trained here."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import attention, mlp
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qkv_bias=bool(config.attention_bias)), *mlp()]


def untrained(config: PretrainedConfig) -> tuple[str, ...]:
    return ("model.mtp_layers.",)
