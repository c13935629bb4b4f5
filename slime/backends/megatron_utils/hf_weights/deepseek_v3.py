"""DeepSeek-V3: MLA, dense layers first, then MoE with shared experts."""

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import (
    expert_bias,
    experts,
    mlp,
    plain,
    shared_experts,
)
from slime.backends.megatron_utils.hf_weights.rules import Rule


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [
        *_latent_attention(config),
        *mlp(),
        *expert_bias(),
        *experts(),
        *shared_experts(),
    ]


def _latent_attention(config: PretrainedConfig) -> list[Rule]:
    ours, theirs = "self_attention.", "self_attn."
    if config.q_lora_rank is None:
        query = [plain(f"{ours}linear_q_proj.weight", f"{theirs}q_proj.weight", "column")]
    else:
        query = [
            plain(f"{ours}linear_q_down_proj.weight", f"{theirs}q_a_proj.weight"),
            plain(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight"),
            plain(f"{ours}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", "column"),
        ]
    return [
        plain("input_layernorm.weight", "input_layernorm.weight"),
        *query,
        plain(f"{ours}linear_kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight"),
        plain(f"{ours}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight"),
        plain(f"{ours}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", "column"),
        plain(f"{ours}linear_proj.weight", f"{theirs}o_proj.weight", "row"),
    ]
