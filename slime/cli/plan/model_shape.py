"""Sizes of a model's layers, from its config.json or, without a checkpoint, from MODEL_ARGS."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Qwen3-4B: hidden 2560, 36 layers, 32 heads of 128 with 8 KV heads, ffn 9728, no experts."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    tied: bool
    qk_norm: bool
    post_norms: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    qk_nope: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    fp8: bool = False
    linear_layers: int = 0  # gated delta nets: a state per request, no KV cache
    delta_qkv: int = 0  # width of queries, keys and values of one of them
    delta_values: int = 0
    delta_heads: int = 0  # of keys
    state_size: int = 0  # elements of the state of one of them, in fp32
    window_size: int = 0  # stored inputs of its convolution, in the model's dtype

    @property
    def delta_share(self) -> float:
        """Return the share of layers that are gated delta nets; all others have gated attention."""
        return self.linear_layers / self.layers

    @property
    def qk_dim(self) -> int:
        return self.qk_nope + self.rope_dim


def read_shape(folder: str) -> Shape:
    raw = json.loads((Path(folder).expanduser() / "config.json").read_text())
    quantized = (raw.get("quantization_config") or {}).get("quant_method") == "fp8"
    try:
        return shape_of({**raw, **raw.get("text_config", {})}, fp8=quantized)
    except KeyError as error:
        raise ConfigError(
            f"--hf-checkpoint: {folder}/config.json has no {error.args[0]}, which the plan needs: give the "
            "config.json of a language model"
        ) from None


def shape_of(config: dict[str, Any], *, fp8: bool = False) -> Shape:
    heads, kind = config["num_attention_heads"], config.get("model_type", "")
    experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    return Shape(
        model_type=kind,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config.get("intermediate_size") or 4 * config["hidden_size"],
        vocab=config["vocab_size"],
        context=config.get("max_position_embeddings") or 32768,
        tied=bool(config.get("tie_word_embeddings")),
        qk_norm=kind.startswith("qwen3") or bool(config.get("use_qk_norm")),
        post_norms=kind == "glm4",
        num_experts=experts,
        experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
        expert_ffn=width if experts else 0,
        shared_ffn=_shared(config, width) if experts else 0,
        fp8=fp8,
        **_latent(config),
        **_delta_nets(config),
    )


def _shared(config: dict[str, Any], width: int) -> int:
    return config.get("shared_expert_intermediate_size") or width * (
        config.get("n_shared_experts") or 0
    )


def _latent(config: dict[str, Any]) -> dict[str, Any]:
    if not config.get("kv_lora_rank"):
        return {}
    return {
        "latent": True,
        "q_lora": config.get("q_lora_rank") or 0,
        "kv_lora": config["kv_lora_rank"],
        "qk_nope": config["qk_nope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"],
        "v_dim": config["v_head_dim"],
    }


def _delta_nets(config: dict[str, Any]) -> dict[str, Any]:
    if not config.get("linear_num_value_heads"):
        return {}
    layers, interval = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types")
    keys, values = (
        [config[f"linear_num_{kind}_heads"], config[f"linear_{kind}_head_dim"]]
        for kind in ("key", "value")
    )
    width = 2 * keys[0] * keys[1] + values[0] * values[1]
    return {
        "linear_layers": kinds.count("linear_attention") if kinds else layers - layers // interval,
        "delta_qkv": width,
        "delta_values": values[0] * values[1],
        "delta_heads": keys[0],
        "state_size": values[0] * keys[1] * values[1],
        "window_size": (config["linear_conv_kernel_dim"] - 1) * width,
    }


def _first(config: dict[str, Any], *names: str) -> int:
    return next((config[name] for name in names if config.get(name)), 0)


_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_CONTEXT = 131072  # not in MODEL_ARGS; bounds lengths only


def config_from_flags(given: dict[str, Any], *, fp8: bool = False) -> dict[str, Any] | None:
    """Return the config, or None if the flags do not describe a model."""
    if any(given.get(name) is None for name in _NEEDED):
        return None
    model_type = _model_type(given)
    heads = given["num_attention_heads"]
    config = {
        "model_type": model_type,
        "num_hidden_layers": given["num_layers"],
        "hidden_size": given["hidden_size"],
        "intermediate_size": given.get("ffn_hidden_size") or 4 * given["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": given.get("num_query_groups") or heads,
        "head_dim": given.get("kv_channels") or given["hidden_size"] // heads,
        "vocab_size": given["vocab_size"],
        "rms_norm_eps": given.get("norm_epsilon") or 1e-5,
        "tie_word_embeddings": not given.get("untie_embeddings_and_output_weights", False),
        "max_position_embeddings": given.get("max_position_embeddings") or _CONTEXT,
        "hidden_act": "silu",
        "attention_bias": bool(given.get("add_qkv_bias")),
        "dtype": "bfloat16",
        "rope_parameters": _rope(given),
        **_EXTRA.get(model_type, lambda _: {})(given),
    }
    return {**config, "quantization_config": _FP8} if fp8 else config


def write_config(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _model_type(given: dict[str, Any]) -> str:
    """Return the model family whose layers have these parts."""
    sparse = given.get("num_experts") is not None
    delta_nets = given.get("linear_attention_freq") is not None
    families = (
        ("qwen3_next", sparse and delta_nets),  # Qwen3.5 with experts has the same layers
        ("qwen3_5_text", delta_nets),
        ("deepseek_v3", given.get("multi_latent_attention")),
        ("gpt_oss", given.get("softmax_type") == "learnable"),
        ("glm4_moe", sparse and given.get("moe_router_score_function") == "sigmoid"),
        ("qwen2_moe", sparse and given.get("moe_shared_expert_gate")),
        ("qwen3_moe", sparse),
        ("glm4", given.get("post_self_attn_layernorm")),
        ("qwen3", given.get("qk_layernorm")),
        ("qwen2", given.get("add_qkv_bias")),
    )
    return next((name for name, matches in families if matches), "llama")


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": given.get("rotary_base") or 10000}
    if given.get("rotary_percent") is not None:
        rope["partial_rotary_factor"] = given["rotary_percent"]
    if given.get("use_rope_scaling"):
        rope |= {
            "rope_type": "llama3",
            "factor": given.get("rope_scaling_factor") or 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if given.get("rope_type") == "yarn" or given.get("position_embedding_type") == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": given.get("rotary_scaling_factor") or 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": given.get("mscale") or 1.0,
            "mscale_all_dim": given.get("mscale_all_dim") or 0.0,
        }
        rope["truncate"] = given.get("position_embedding_type") != "yarn"
    return rope


def _dense_first(given: dict[str, Any]) -> int:
    pattern = given.get("moe_layer_freq")
    if isinstance(pattern, str):
        pattern = _read_pattern(pattern)
    return pattern.index(1) if isinstance(pattern, list) and 1 in pattern else 0


def _read_pattern(text: str) -> list[int] | None:
    """Parse --moe-layer-freq: `[0]*3+[1]*89` is three dense layers, then 89 MoE layers."""
    layers: list[int] = []
    for part in text.replace(" ", "").split("+"):
        values, _, times = part.partition("*")
        if not values.startswith("["):
            return None
        layers += [int(v) for v in values.strip("[]").split(",") if v] * int(times or 1)
    return layers


def _qwen3_moe(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": given["num_experts"],
        "moe_intermediate_size": given.get("moe_ffn_hidden_size"),
        "num_experts_per_tok": given.get("moe_router_topk") or 2,
        "norm_topk_prob": not given.get("moe_router_pre_softmax"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(given: dict[str, Any]) -> dict[str, Any]:
    return {
        **_qwen3_moe(given),
        "shared_expert_intermediate_size": given.get("moe_shared_expert_intermediate_size"),
        "qkv_bias": bool(given.get("add_qkv_bias")),
    }


def _qwen3_next(given: dict[str, Any]) -> dict[str, Any]:
    return {**_qwen2_moe(given), **_delta_nets_of(given)}


def _delta_nets_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of gated delta nets, with megatron-core's defaults."""
    sizes = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    found = {name: given.get(name) or default for name, default in sizes.items()}
    pattern = given["linear_attention_freq"]
    if len(pattern) == 1:  # every N-th layer has full attention
        return {"full_attention_interval": pattern[0], **found}
    kinds = ["linear_attention" if linear else "full_attention" for linear in pattern]
    return {"layer_types": kinds, **found}


def _sigmoid_moe(given: dict[str, Any]) -> dict[str, Any]:
    shared, width = given.get("moe_shared_expert_intermediate_size"), given["moe_ffn_hidden_size"]
    return {
        "n_routed_experts": given["num_experts"],
        "moe_intermediate_size": width,
        "num_experts_per_tok": given.get("moe_router_topk") or 2,
        "n_shared_experts": shared // width if shared else None,
        "first_k_dense_replace": _dense_first(given),
        "norm_topk_prob": True,
        "routed_scaling_factor": given.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": given.get("moe_router_num_groups") or 1,
        "topk_group": given.get("moe_router_group_topk") or 1,
    }


def _glm4_moe(given: dict[str, Any]) -> dict[str, Any]:
    return {**_sigmoid_moe(given), "use_qk_norm": bool(given.get("qk_layernorm"))}


def _deepseek_v3(given: dict[str, Any]) -> dict[str, Any]:
    return {
        **_sigmoid_moe(given),
        "q_lora_rank": given.get("q_lora_rank"),
        "kv_lora_rank": given.get("kv_lora_rank"),
        "qk_nope_head_dim": given.get("qk_head_dim"),
        "qk_rope_head_dim": given.get("qk_pos_emb_head_dim"),
        "v_head_dim": given.get("v_head_dim"),
        "head_dim": given.get("qk_pos_emb_head_dim"),
        "num_key_value_heads": given["num_attention_heads"],
        "rope_interleave": True,
    }


def _gpt_oss(given: dict[str, Any]) -> dict[str, Any]:
    window, pattern = given.get("window_size"), given.get("window_attn_skip_freq")
    return {
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given.get("moe_router_topk") or 4,
        "attention_bias": True,
        "sliding_window": window[0] + 1 if window else None,
        "swiglu_limit": given.get("activation_func_clamp_value") or 7.0,
        "layer_types": [
            "sliding_attention" if slides else "full_attention" for slides in pattern or []
        ]
        or None,
    }


_EXTRA = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _delta_nets_of,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
