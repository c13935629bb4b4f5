"""Sizes of a model's layers, from its config.json."""

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


def _first(config: dict[str, Any], *names: str) -> int:
    return next((config[name] for name in names if config.get(name)), 0)
