"""config.json of the models that scripts/models describes, as far as it matters, from published facts."""

from __future__ import annotations

from transformers import (
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

from slime.backends.megatron_utils.model_config import MimoConfig


def _fields(layers, hidden, ffn, heads, groups, head_dim, vocab, theta, eps, tied, **more):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131072,
        **more,
    }


def _llama3(factor: float) -> dict:
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _glm_rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}


def _experts(count: int, topk: int, ffn: int) -> dict:
    return {
        "num_experts": count,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": True,
    }


def _glm_experts(count: int, ffn: int, dense: int, scale: float) -> dict:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": ffn,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": scale,
        "attention_bias": True,
        "rope_parameters": _glm_rope(1e6),
    }


def _gpt_oss(layers: int, experts: int) -> PretrainedConfig:
    return GptOssConfig(
        num_hidden_layers=layers,
        num_local_experts=experts,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )


_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}


def _kimi_k2(factor: float, eps: float) -> PretrainedConfig:
    """Its config.json says model_type kimi_k2, which is read as deepseek_v3."""
    yarn = {**_DEEPSEEK_YARN, "rope_theta": 5e4, "factor": factor, "beta_fast": 1.0}
    return DeepseekV3Config(
        vocab_size=163840,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=384,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        n_group=1,
        topk_group=1,
        rms_norm_eps=eps,
        max_position_embeddings=int(4096 * factor),
        rope_parameters=yarn,
        num_nextn_predict_layers=0,
    )


def _qwen2_moe(experts: tuple, shared: int, *facts) -> PretrainedConfig:
    fields = _fields(*facts, 151936, 1e6, 1e-6, False, **_experts(*experts))
    return Qwen2MoeConfig(
        **{**fields, "norm_topk_prob": False}, shared_expert_intermediate_size=shared
    )


def _hybrid(layers, hidden, ffn, groups, vocab, **more) -> dict:
    """Of a model with gated delta nets: 16 heads of 256, and 16 key and 32 value heads of 128."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    linear = {f"linear_{kind}_head_dim": 128 for kind in ("key", "value")}
    linear |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    return {
        **_fields(layers, hidden, ffn, 16, groups, 256, vocab, 1e7, 1e-6, False),
        **linear,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": rope,
        **more,
    }


_L8 = (32, 4096, 14336, 32, 8, 128, 128256, 5e5, 1e-5, False)

MODELS = {
    "qwen2.5-0.5B": lambda: Qwen2Config(
        **_fields(24, 896, 4864, 14, 2, 64, 151936, 1e6, 1e-6, True)
    ),
    "qwen2.5-1.5B": lambda: Qwen2Config(
        **_fields(28, 1536, 8960, 12, 2, 128, 151936, 1e6, 1e-6, True)
    ),
    "qwen2.5-3B": lambda: Qwen2Config(
        **_fields(36, 2048, 11008, 16, 2, 128, 151936, 1e6, 1e-6, True)
    ),
    "qwen2.5-32B": lambda: Qwen2Config(
        **_fields(64, 5120, 27648, 40, 8, 128, 152064, 1e6, 1e-5, False)
    ),
    "qwen2.5-7B": lambda: Qwen2Config(
        **_fields(28, 3584, 18944, 28, 4, 128, 152064, 1e6, 1e-6, False)
    ),
    "qwen3-0.6B": lambda: Qwen3Config(
        **_fields(28, 1024, 3072, 16, 8, 128, 151936, 1e6, 1e-6, True)
    ),
    "qwen3-4B": lambda: Qwen3Config(**_fields(36, 2560, 9728, 32, 8, 128, 151936, 1e6, 1e-6, True)),
    "qwen3-8B": lambda: Qwen3Config(
        **_fields(36, 4096, 12288, 32, 8, 128, 151936, 1e6, 1e-6, False)
    ),
    "qwen3-1.7B": lambda: Qwen3Config(
        **_fields(28, 2048, 6144, 16, 8, 128, 151936, 1e6, 1e-6, True)
    ),
    "qwen3-14B": lambda: Qwen3Config(
        **_fields(40, 5120, 17408, 40, 8, 128, 151936, 1e6, 1e-6, False)
    ),
    "qwen3-32B": lambda: Qwen3Config(
        **_fields(64, 5120, 25600, 64, 8, 128, 151936, 1e6, 1e-6, False)
    ),
    "qwen3-4B-Instruct-2507": lambda: Qwen3Config(
        **_fields(36, 2560, 9728, 32, 8, 128, 151936, 5e6, 1e-6, True)
    ),
    "llama2-7B": lambda: LlamaConfig(
        **_fields(32, 4096, 11008, 32, 32, 128, 32000, 1e4, 1e-5, False)
    ),
    "llama3-8B": lambda: LlamaConfig(**_fields(*_L8)),
    "llama3.1-8B": lambda: LlamaConfig(**{**_fields(*_L8), "rope_parameters": _llama3(8.0)}),
    "llama3.2-3B": lambda: LlamaConfig(
        **{
            **_fields(28, 3072, 8192, 24, 8, 128, 128256, 5e5, 1e-5, True),
            "rope_parameters": _llama3(32.0),
        }
    ),
    "glm4-9B": lambda: Glm4Config(
        **{
            **_fields(40, 4096, 13696, 32, 2, 128, 151552, 1e4, 1e-5, False, attention_bias=True),
            "rope_parameters": _glm_rope(1e4),
        }
    ),
    "glm4-32B": lambda: Glm4Config(
        **{
            **_fields(61, 6144, 23040, 48, 2, 128, 151552, 1e4, 1e-5, False, attention_bias=False),
            "rope_parameters": _glm_rope(1e4),
        }
    ),
    "mimo-7B": lambda: MimoConfig(
        **_fields(36, 4096, 11008, 32, 8, 128, 151680, 6.4e5, 1e-5, False, attention_bias=True)
    ),
    "qwen3-30B-A3B": lambda: Qwen3MoeConfig(
        **_fields(48, 2048, 6144, 32, 4, 128, 151936, 1e6, 1e-6, False, **_experts(128, 8, 768))
    ),
    "qwen3-235B-A22B": lambda: Qwen3MoeConfig(
        **_fields(94, 4096, 12288, 64, 4, 128, 151936, 1e6, 1e-6, False, **_experts(128, 8, 1536))
    ),
    "glm4.5-355B-A32B": lambda: Glm4MoeConfig(
        **{
            **_fields(92, 5120, 12288, 96, 8, 128, 151552, 1e6, 1e-5, False, use_qk_norm=True),
            **_glm_experts(160, 1536, 3, 2.5),
        }
    ),
    "glm4.5-106B-A12B": lambda: Glm4MoeConfig(
        **{
            **_fields(46, 4096, 10944, 96, 8, 128, 151552, 1e6, 1e-5, False, use_qk_norm=False),
            **_glm_experts(128, 1408, 1, 1.0),
        }
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        max_position_embeddings=163840, rope_parameters=_DEEPSEEK_YARN
    ),
    "deepseek-v3-5layer": lambda: DeepseekV3Config(
        max_position_embeddings=163840, rope_parameters=_DEEPSEEK_YARN, num_hidden_layers=5
    ),
    "deepseek-v3-20layer": lambda: DeepseekV3Config(
        max_position_embeddings=163840, rope_parameters=_DEEPSEEK_YARN, num_hidden_layers=20
    ),
    "moonlight": lambda: DeepseekV3Config(
        **{
            **_fields(27, 2048, 11264, 16, 16, 64, 163840, 5e4, 1e-5, False),
            "max_position_embeddings": 8192,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        }
    ),
    "kimi-k2": lambda: _kimi_k2(32.0, 1e-6),
    "kimi-k2-thinking": lambda: _kimi_k2(64.0, 1e-5),
    "glm4.7-30B-A3B": lambda: Glm4MoeLiteConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
        num_nextn_predict_layers=1,
    ),
    "qwen1.5-moe-A2.7B": lambda: _qwen2_moe((60, 4, 1408), 5632, 24, 2048, 5632, 16, 16, 128),
    "qwen2-57B-A14B": lambda: _qwen2_moe((64, 8, 2560), 20480, 28, 3584, 18944, 28, 4, 128),
    "qwen3-next-80B-A3B": lambda: Qwen3NextConfig(
        **_hybrid(48, 2048, 5120, 2, 151936, **_experts(512, 10, 512)),
        shared_expert_intermediate_size=512,
    ),
    "qwen3.5-9B": lambda: Qwen3_5TextConfig(**_hybrid(32, 4096, 12288, 4, 248320)),
    "qwen3.5-35B-A3B": lambda: Qwen3_5MoeTextConfig(
        **_hybrid(40, 2048, None, 2, 248320, **_experts(256, 8, 512)),
        shared_expert_intermediate_size=512,
    ),
    "gpt-oss-20B": lambda: _gpt_oss(24, 32),
    "gpt-oss-120B": lambda: _gpt_oss(36, 128),
}
# Names under which existing run scripts source the same model.
SAME_MODEL = {
    "llama3.1-8B-Instruct": "llama3.1-8B",
    "llama3.2-3B-Instruct": "llama3.2-3B",
    "llama3.2-3B-Instruct-amd": "llama3.2-3B",
    "mimo-7B-rl": "mimo-7B",
    "glm4.6-355B-A32B": "glm4.5-355B-A32B",
    "glm4.7-355B-A32B": "glm4.5-355B-A32B",
    "deepseek-v3.1": "deepseek-v3",
}
MODELS |= {name: MODELS[other] for name, other in SAME_MODEL.items()}
