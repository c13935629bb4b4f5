"""GLM4 (0414): norms behind attention and MLP too, gate and up in one tensor."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import H, M, attention, plain
from slime.backends.megatron_utils.hf_weights.mappings import GateUp
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [
        *attention(config, qkv_bias=bool(config.attention_bias)),
        plain("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Rule(f"{M}mlp.linear_fc1.weight", (f"{H}mlp.gate_up_proj.weight",), GateUp(fused=True)),
        plain("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
        plain("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
    ]
