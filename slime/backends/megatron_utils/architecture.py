"""Translate a Hugging Face config into megatron-core's configuration, family by family."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from transformers import PretrainedConfig

from slime.backends.megatron_utils.rope import Rope, read_rope
from slime.config.checks.model_types import (
    DELTA_OPTIONS,
    LATENT,
    check_delta_net,
    check_model_type,
)
from slime.core.errors import ConfigError, UserError


@dataclass(kw_only=True)
class Architecture:
    """Arguments of megatron-core: `fields` for TransformerConfig, the rest for GPTModel.

    A model with four layers of which the first is dense has `moe_layer_freq=[0, 1, 1, 1]`.
    """

    fields: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    tied: bool
    rope: Rope
    post_norms: bool = False  # norms after attention and MLP too
    router_bias: bool = False


def architecture(config: PretrainedConfig) -> Architecture:
    """Return the architecture; raise UserError if megatron-core or this backend lacks a feature."""
    check_model_type(config.model_type)
    model = Architecture(
        fields=_common(config),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
        rope=read_rope(config, latent=config.model_type in LATENT),
    )
    _FAMILIES[config.model_type](config, model)
    return model


def _common(config: PretrainedConfig) -> dict[str, Any]:
    if config.hidden_act != "silu":
        raise _unsupported(config, "hidden_act", config.hidden_act, "silu")
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": getattr(config, "num_key_value_heads", None) or heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": getattr(config, "intermediate_size", None)
        or config.moe_intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        **_ABSENT,
    }


# Features of some families only, listed so that a flag that sets one elsewhere is refused.
_ABSENT: dict[str, Any] = {
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "layernorm_zero_centered_gamma": False,
    "attention_output_gate": False,
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
}


# ---- families


def _llama(config: PretrainedConfig, model: Architecture) -> None:
    _require(config, attention_bias=False, mlp_bias=False)


def _qwen2(config: PretrainedConfig, model: Architecture) -> None:
    _require(config, use_sliding_window=False)
    model.fields["add_qkv_bias"] = True


def _mimo(config: PretrainedConfig, model: Architecture) -> None:
    _require(config, use_sliding_window=False)
    model.fields["add_qkv_bias"] = bool(config.attention_bias)


def _qwen3(config: PretrainedConfig, model: Architecture) -> None:
    _require(config, use_sliding_window=False, attention_bias=False)
    model.fields["qk_layernorm"] = True


def _qwen2_moe(config: PretrainedConfig, model: Architecture) -> None:
    _require(config, use_sliding_window=False)
    model.fields["add_qkv_bias"] = bool(config.qkv_bias)
    model.fields |= _softmax_moe(config) | {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _qwen3_moe(config: PretrainedConfig, model: Architecture) -> None:
    _qwen3(config, model)
    model.fields |= _softmax_moe(config)


def _qwen3_5(config: PretrainedConfig, model: Architecture) -> None:
    """Set the fields of gated delta nets, gated attention and zero-centred norms."""
    check_delta_net(config.to_dict())
    _require(config, attention_bias=False)
    model.fields |= {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        # Not experimental_attention_variant, with which megatron-core refuses context parallelism.
        "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
        **{name: getattr(config, name) for name in DELTA_OPTIONS},
    }


def _qwen3_5_moe(config: PretrainedConfig, model: Architecture) -> None:
    _qwen3_5(config, model)
    model.fields |= _softmax_moe(config) | {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _softmax_moe(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of Qwen's router, a softmax over all experts; some layers may be dense."""
    dense, every = getattr(config, "mlp_only_layers", ()), getattr(config, "decoder_sparse_step", 1)
    sparse = [
        int(layer not in dense and config.num_experts > 0 and (layer + 1) % every == 0)
        for layer in range(config.num_hidden_layers)
    ]
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Softmax over the top-k logits equals softmax over all, renormalised over the top-k.
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_layer_freq": sparse,
    }


def _glm4(config: PretrainedConfig, model: Architecture) -> None:
    model.fields["add_qkv_bias"] = bool(config.attention_bias)
    model.fields["rotary_interleaved"] = True
    model.post_norms = True


def _glm4_moe(config: PretrainedConfig, model: Architecture) -> None:
    model.fields["add_qkv_bias"] = bool(config.attention_bias)
    model.fields["qk_layernorm"] = bool(config.use_qk_norm)
    model.fields |= _sigmoid_moe(config, _dense_first(config))


def _deepseek_v3(config: PretrainedConfig, model: Architecture) -> None:
    model.fields |= _latent(config, model) | _sigmoid_moe(config, _dense_first(config))


def _glm4_moe_lite(config: PretrainedConfig, model: Architecture) -> None:
    if model.rope.percent != 1.0:
        raise _unsupported(config, "partial_rotary_factor", model.rope.percent, "1.0")
    sparse = [int(kind == "sparse") for kind in config.mlp_layer_types]
    model.fields |= _latent(config, model) | _sigmoid_moe(config, sparse)


def _latent(config: PretrainedConfig, model: Architecture) -> dict[str, Any]:
    """Return the fields of multi-head latent attention."""
    _require(config, attention_bias=False, rope_interleave=True)
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the two latents
        "num_query_groups": config.num_attention_heads,
        "kv_channels": config.v_head_dim,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rotary_base": model.rope.base,
        "rope_type": "yarn" if model.rope.yarn else "rope",
        **(model.rope.yarn or {"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}),
    }


def _gpt_oss(config: PretrainedConfig, model: Architecture) -> None:
    # transformers has it as a constant before 5.18.
    alpha = getattr(config, "swiglu_alpha", _QUICK_GELU_ALPHA)
    if alpha != _QUICK_GELU_ALPHA:
        raise _unsupported(config, "swiglu_alpha", alpha, str(_QUICK_GELU_ALPHA))
    _require(config, attention_bias=True)
    sliding = [int(kind == "sliding_attention") for kind in config.layer_types]
    model.router_bias = True
    model.fields |= {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": (config.sliding_window - 1, 0) if any(sliding) else None,
        "window_attn_skip_freq": sliding if any(sliding) else None,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": float(getattr(config, "swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_layer_freq": [1] * config.num_hidden_layers,
    }


def _dense_first(config: PretrainedConfig) -> list[int]:
    dense = config.first_k_dense_replace
    return [0] * dense + [1] * (config.num_hidden_layers - dense)


def _sigmoid_moe(config: PretrainedConfig, sparse: list[int]) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's router: sigmoid scores, bias, top-k in expert groups."""
    topk, groups, chosen = config.num_experts_per_tok, config.n_group, config.topk_group
    if topk > 1:
        _require(config, norm_topk_prob=True)
    grouped = groups is not None and groups > 1
    if grouped and topk // chosen != 2:
        # Groups are ranked by their best two experts; megatron-core uses the best topk / chosen.
        raise _unsupported(config, "topk_group", chosen, f"{topk // 2}")
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": (
            config.moe_intermediate_size * config.n_shared_experts
            if config.n_shared_experts
            else None
        ),
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": chosen if grouped else None,
        "moe_layer_freq": sparse,
    }


def _require(config: PretrainedConfig, **options: bool) -> None:
    """Raise UserError unless the options have these values; absent ones are false."""
    for name, wanted in options.items():
        if bool(getattr(config, name, False)) is not wanted:
            raise _unsupported(config, name, not wanted, str(wanted).lower())


def _unsupported(config: PretrainedConfig, name: str, value: object, wanted: str) -> UserError:
    return UserError(
        f"config.json of --hf-checkpoint says {name} {value}: the Megatron backend trains "
        f"{config.model_type} only with {wanted}. Use --train-backend fsdp"
    )


def layer_pattern(text: str | int | list[int], num_layers: int) -> list[int]:
    """Return 1 for each MoE layer and 0 for each dense one, from --moe-layer-freq.

    Megatron's scripts write `[0,1,1]`, `[0]*3+[1]*89`, or a number N: every N-th layer is MoE.

    >>> layer_pattern("[0]*1+[1]*3", 4)
    [0, 1, 1, 1]
    """
    if isinstance(text, list):
        pattern = text
    elif str(text).strip().isdigit():
        every = int(text)
        if every == 0:
            raise ConfigError(
                "--moe-layer-freq 0: every N-th layer is MoE: give N of at least 1, or a pattern such as "
                "[0]*3+[1]*89"
            )
        pattern = [int(layer % every == 0) for layer in range(num_layers)]
    else:
        pattern = [value for part in str(text).split("+") for value in _repeated(part, str(text))]
    if len(pattern) != num_layers:
        raise ConfigError(
            f"--moe-layer-freq {text} describes {len(pattern)} layers and the model has {num_layers}"
        )
    return pattern


def linear_pattern(given: list[int], num_layers: int) -> list[int]:
    """Return 1 for each layer with linear attention, from --linear-attention-freq.

    One number N means that every N-th layer has full attention; more are the pattern itself.

    >>> linear_pattern([4], 4)
    [1, 1, 1, 0]
    """
    if len(given) != 1 or given[0] < 1:
        return given
    return [int((layer + 1) % given[0] > 0) for layer in range(num_layers)]


def _repeated(part: str, text: str) -> list[int]:
    match = _PATTERN_PART.fullmatch(part)
    if match is None:
        raise ConfigError(
            f"--moe-layer-freq {text} is not a pattern: write a number or lists as [0]*3+[1]*89"
        )
    values = [int(value) for value in match[1].split(",") if value.strip()]
    return values * int(match[2] or 1)


_PATTERN_PART = re.compile(r"\s*(?:\(\s*)?\[([01,\s]*)\](?:\s*\*\s*(\d+))?(?:\s*\))?\s*")
_QUICK_GELU_ALPHA = 1.702

_FAMILIES: dict[str, Callable[[PretrainedConfig, Architecture], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mimo": _mimo,
    "glm4": _glm4,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "deepseek_v3": _deepseek_v3,
    "qwen3_vl_text": _qwen3,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_next": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
}
