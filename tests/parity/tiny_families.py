"""A tiny random Hugging Face checkpoint of every family the Megatron backend trains."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB_SIZE = 100  # padded by every layout
NUM_LAYERS = 4

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "dtype": "float32",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
_SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 40}


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """Of the model that stands for the family; MiMo is a Qwen2 with more tensors."""
    config = _CONFIGS[family]()
    fields = config.to_dict()
    if "num_hidden_layers" in changes:
        fields.pop("layer_types", None)
        fields.pop("mlp_layer_types", None)
    return type(config)(**{**fields, **changes})


_CONFIGS = {
    "llama": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 4}),
    "llama3.1": lambda: LlamaConfig(
        **{**_COMMON, "max_position_embeddings": 131072}, head_dim=16, rope_parameters=_LLAMA3
    ),
    "qwen2": lambda: Qwen2Config(**{**_COMMON, "tie_word_embeddings": True}),
    "qwen3": lambda: Qwen3Config(**{**_COMMON, "tie_word_embeddings": True}, head_dim=16),
    "mimo": lambda: Qwen2Config(**_COMMON),
    "glm4": lambda: Glm4Config(**_COMMON, head_dim=16, attention_bias=True),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, **_EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_COMMON, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=40
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_COMMON,
        **_EXPERTS,
        **_SHARED,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_COMMON, **_EXPERTS, **_SHARED, **_MLA, "num_experts_per_tok": 4},
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    # DeepSeek-V3's layers, one group of experts, and queries rotated with few frequencies.
    "kimi_k2": lambda: DeepseekV3Config(
        **{**_COMMON, **_EXPERTS, **_SHARED, **_MLA, "num_experts_per_tok": 3},
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        rms_norm_eps=1e-3,  # not that of the latents
        rope_parameters={**_YARN, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        num_nextn_predict_layers=0,
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(
        **{**_COMMON, **_EXPERTS, **_SHARED, **_MLA},
        rms_norm_eps=1e-3,
        num_nextn_predict_layers=1,
    ),
    # Layers 0 to 2 have gated delta nets, layer 3 has attention.
    "qwen3_next": lambda: Qwen3NextConfig(
        **_COMMON, **_EXPERTS, **_SHARED_EXPERT, **_DELTA_NET, mlp_only_layers=[1]
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**{**_COMMON, "tie_word_embeddings": True}, **_DELTA_NET),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **{name: value for name, value in _COMMON.items() if name != "intermediate_size"},
        **_EXPERTS,
        **_SHARED_EXPERT,
        **_DELTA_NET,
    ),
}
FAMILIES = list(_CONFIGS)
_YARN_16 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Ways to scale rotary frequencies that these models are not published with: family and parameters.
ROPES: dict[str, tuple[str, dict]] = {
    "qwen3 yarn": ("qwen3", {**_YARN_16, "rope_theta": 1e4}),
    "qwen2 yarn by a factor": ("qwen2", {**_YARN_16, "rope_theta": 1e4, "attention_factor": 1.3}),
    "glm4 yarn": ("glm4", {**_YARN_16, "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "llama linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    "glm4_moe linear": (
        "glm4_moe",
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0, "partial_rotary_factor": 0.5},
    ),
    "qwen3_moe llama3": (
        "qwen3_moe",
        {
            **_LLAMA3,
            "rope_theta": 1e4,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    ),
}
MOE = ["gpt_oss", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite"]
MOE += ["qwen3_next", "qwen3_5_moe"]
DELTA_NETS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]

# Tensors of layers that predict further tokens, which a checkpoint may hold and nobody trains.
UNTRAINED = {
    "mimo": ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.weight"],
    "glm4_moe": [f"model.layers.{NUM_LAYERS}.eh_proj.weight"],
    "deepseek_v3": [f"model.layers.{NUM_LAYERS}.eh_proj.weight"],
    "glm4_moe_lite": [f"model.layers.{NUM_LAYERS}.eh_proj.weight"],
    **{name: ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"] for name in DELTA_NETS},
}


def make_family(folder: Path, family: str, *, seed: int = 0, **changes: object) -> Path:
    """Write a checkpoint whose every tensor is random, norms, biases and sinks included."""
    model = make_model(family, seed=seed, **changes)
    for param in model.parameters():  # buffers, such as a router's bias, stay in float32
        param.data = param.data.to(model.config.dtype)
    model.save_pretrained(folder)
    extra = UNTRAINED.get(family, [])
    if extra:
        file = folder / "model.safetensors"
        tensors = load_file(file) | {name: torch.randn(8, 8) for name in extra}
        save_file(tensors, file, metadata={"format": "pt"})
    if family in _PUBLISHED_AS:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | _PUBLISHED_AS[family]))
    return folder


# What config.json says of models for which transformers has no class of their own.
_PUBLISHED_AS = {
    "mimo": {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    },
}


def make_model(family: str, *, seed: int = 0, **changes: object) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, **changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, tensor in model.state_dict(keep_vars=True).items():
            noise = torch.randn_like(tensor)
            if "norm" in name:
                centered = family in DELTA_NETS and "linear_attn" not in name
                tensor.data.copy_((0 if centered else 1) + 0.2 * noise)
            elif tensor.ndim == 1 or name.endswith("_bias"):
                tensor.data.copy_(0.1 * noise)
            else:
                tensor.data.copy_(0.2 * noise)
    return model.float().eval()
