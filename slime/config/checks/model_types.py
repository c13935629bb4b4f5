"""Which trainer supports which model type, and what to use for a type it does not support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.config.checks.file_checks import read_config_json, read_quantization
from slime.config.flags.draft import Draft
from slime.config.flags.train import MUON
from slime.config.installed import is_installed
from slime.core.errors import ConfigError

TRAINED = (
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama",
    "mimo",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
MTP = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mimo")  # may have multi-token-prediction layers
LATENT = ("deepseek_v3", "glm4_moe_lite")  # multi-head latent attention
# Types whose models are Python code in the checkpoint, which is never run, and the type of
# transformers that has the same layers, tensors and settings.
_READ_AS = {"kimi_k2": "deepseek_v3"}
_ROPES = ("default", "linear", "llama3", "yarn")
_PACKED_LAYERS = {"full_attention", "sliding_attention"}
# Text models with gated delta nets, for which both trainers have layers that respect sample boundaries.
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DELTA_OPTIONS = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_ALWAYS_VISION = ("qwen3_vl", "qwen3_vl_moe")  # transformers has no text-only model of them
VISION = (*_ALWAYS_VISION, "qwen3_5", "qwen3_5_moe")  # models with a vision tower
TOWER = "model.visual."  # prefix of the names of its tensors and modules
_INDEXED = "its sparse attention, in which an indexer chooses the tokens that each token attends to, is missing"
_MISSING = {
    "glm_moe_dsa": _INDEXED,
    "deepseek_v32": _INDEXED,
}


def check_model_type(model_type: str) -> None:
    """Raise ConfigError if the Megatron backend does not train models of this type."""
    if read_as(model_type) in TRAINED:
        return
    why = _MISSING.get(family_of(model_type), f"it trains {', '.join(TRAINED)}")
    raise ConfigError(
        f"--train-backend megatron does not train models of type {model_type}: {why}. "
        f"{_instead(model_type)}"
    )


def check_fsdp_type(draft: Draft, config: dict[str, Any]) -> None:
    """Refuse types that the FSDP backend would refuse only after the start."""
    model_type = config.get("model_type") or ""
    if has_linear_attention(model_type):
        check_delta_net(config)
    if has_linear_attention(model_type) or family_of(model_type) in (*_MISSING, *_ALWAYS_VISION):
        refusal = fsdp_refusal(model_type, padded=draft["qkv_format"] == "bshd")
        if refusal is not None:
            raise ConfigError(refusal)


def check_images(draft: Draft) -> None:
    """Refuse images that the model, or the run's layout, does not take."""
    keys, limits = draft["multimodal_keys"], draft["limit_mm_data_per_request"]
    if not keys:
        return
    config, problem = read_config_json(draft), None
    if set(keys) != {"image"} or not isinstance(keys["image"], str):
        problem = 'expected {"image": KEY}: only images are trained with'
    elif limits and (set(limits) != {"image"} or type(limits["image"]) is not int):
        problem = '--limit-mm-data-per-request is {"image": NUMBER}'
    elif config and (config.get("model_type") not in VISION or "vision_config" not in config):
        known = ", ".join(VISION)
        problem = f"--hf-checkpoint is a {config.get('model_type')} model; images are trained with {known}"
    elif draft["qkv_format"] == "bshd":
        problem = "images are trained in packed sequences: remove --qkv-format bshd"
    elif read_quantization(draft):
        problem = "--hf-checkpoint holds FP8 weights: give the model's bf16 weights"
    elif draft["use_opd"]:
        problem = "--use-opd: teachers get tokens and no images: remove one of them"
    elif draft["train_backend"] == "megatron":
        problem = _megatron_obstacle(draft)
    if problem is not None:
        raise ConfigError(f"--multimodal-keys: {problem}")


def _megatron_obstacle(draft: Draft) -> str | None:
    """Return why Megatron cannot train on images with these flags, or None."""
    if draft["apply_rope_fusion"] or draft["attention_backend"] in ("fused", "unfused", "flash"):
        return "positions in images need one angle per token: remove --apply-rope-fusion and --attention-backend"
    if draft["freeze_vision_tower"]:
        return None
    if draft["recompute_granularity"] == "full":
        return "a trained tower's features do not pass recomputed layers: use --recompute-granularity selective"
    if MUON.holds(draft):
        return f"--optimizer {draft['optimizer']} is not for a trained tower: use --optimizer adam"
    return None


def takes_images(model_type: str, images: bool) -> bool:
    """Return whether a run with or without images has the vision tower, and not the text model alone."""
    return model_type in VISION and (images or model_type in _ALWAYS_VISION)


def has_tower(args: Any) -> bool:
    """Return whether the trained model is the vision-language model of --hf-checkpoint."""
    config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    return takes_images(config.get("model_type") or "", bool(args.multimodal_keys))


def trains_tower(args: Any) -> bool:
    """Return whether the vision tower is trained with the language model."""
    return bool(args.multimodal_keys) and not args.freeze_vision_tower


def in_tower(name: str) -> bool:
    """Return whether a tensor or module belongs to a vision tower: "model.visual.blocks.0.attn.qkv"."""
    return name.startswith(TOWER)


def read_as(model_type: str) -> str:
    """Return the type of transformers as which a model is read: "deepseek_v3" for "kimi_k2"."""
    return _READ_AS.get(model_type, model_type)


def check_delta_net(config: dict[str, Any]) -> None:
    """Raise ConfigError for options of gated delta nets and gated attention that slime does not have."""
    unknown = sorted(k for k in config if k.startswith("linear_") and k not in DELTA_OPTIONS)
    keys, values = (config.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    problem = None
    if unknown:
        problem = f"the option {unknown[0]} of linear attention, which slime does not support"
    elif config.get("hidden_act", "silu") != "silu":
        problem = f"hidden_act {config['hidden_act']}: gated delta nets are trained with silu"
    elif config.get("attn_output_gate") is False:
        problem = "attn_output_gate false: its attention is trained with the gate"
    elif keys and values and values % keys:
        problem = (
            f"linear_num_value_heads {values}, which linear_num_key_heads {keys} does not divide"
        )
    if problem:
        raise ConfigError(
            f"config.json of --hf-checkpoint has {problem}: give the published checkpoint of a "
            f"{config['model_type']} model"
        )


def check_delta_layout(draft: Draft, config: dict[str, Any]) -> None:
    """Raise ConfigError for gated delta nets that Megatron cannot train with these flags.

    Context ranks exchange tokens for heads, so they share the heads of a tensor rank.
    """
    kind, variant = config.get("model_type"), draft["experimental_attention_variant"]
    if variant == "dsa" or (variant and kind and not has_linear_attention(kind)):
        raise ConfigError(
            f"--experimental-attention-variant {variant}: the model of --hf-checkpoint ({kind}) has no such "
            "layers: remove it"
        )
    if not has_linear_attention(kind):
        return
    check_delta_net(config)
    tp, cp = draft["tensor_model_parallel_size"], draft["context_parallel_size"]
    heads = config.get("linear_num_key_heads") or 16
    if heads % (tp * cp):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} = {tp * cp} does not divide the "
            f"{heads} key heads of the model's gated delta nets (linear_num_key_heads): choose sizes that do"
        )
    if draft["mtp_num_layers"]:
        raise ConfigError(
            f"--mtp-num-layers {draft['mtp_num_layers']}: the MTP layers of {kind} (mtp.* in --hf-checkpoint) "
            "have no layer here, nor in transformers, so they are copied to exports unchanged: remove it"
        )


def has_linear_attention(model_type: str | None) -> bool:
    """Return whether models of this type have gated delta nets, which need sample boundaries."""
    return model_type in _DELTA_NETS or f"{model_type}_text" in _DELTA_NETS


def family_of(model_type: str) -> str:
    """Return "qwen3_vl" for "qwen3_vl_text", the type of the text model of a vision-language model."""
    return model_type.removesuffix("_text")


def fsdp_refusal(model_type: str, *, padded: bool) -> str | None:
    """Return why the FSDP backend does not train models of this type, or None."""
    if not is_installed("transformers"):
        return None
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    refusal = f"--train-backend fsdp does not train models of type {model_type}: "
    if read_as(model_type) not in CONFIG_MAPPING:
        return f"{refusal}transformers {__version__} does not have them"
    if family_of(model_type) in _ALWAYS_VISION:
        return f"{refusal}on padded rows: remove --qkv-format bshd" if padded else None
    config_class = CONFIG_MAPPING[read_as(model_type)]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{refusal}transformers {__version__} has no causal language model for them"
    obstacle = packing_obstacle(config_class(), MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    if padded or obstacle is None:
        return None
    return f"{refusal}the model {obstacle}, which would mix packed samples: add --qkv-format bshd"


def packing_obstacle(config: Any, model_class: Any) -> str | None:
    """Return why packed samples would be mixed in a model of transformers, or None.

    Layers that mix tokens outside attention do not see where one sample ends.
    """
    known = _PACKED_LAYERS | (
        {"linear_attention"} if has_linear_attention(config.model_type) else set()
    )
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ()) - known
    if layers:
        return f"has layers of type {', '.join(sorted(layers))}"
    if has_linear_attention(config.model_type):
        return None
    if model_class._is_stateful:
        return "carries a recurrent state"
    if not model_class._supports_attention_backend:
        return "does not take its attention function from transformers' attention interface"
    return None


def check_rope(model_type: str, rope_type: str) -> None:
    """Raise ConfigError if the Megatron backend does not have the RoPE scaling of config.json."""
    known = ("default", "yarn") if read_as(model_type) in LATENT else _ROPES
    if rope_type not in known:
        raise ConfigError(
            f"config.json of --hf-checkpoint has rope_type {rope_type}: --train-backend megatron trains "
            f"{model_type} with {', '.join(known[:-1])} or {known[-1]}. Use --train-backend fsdp"
        )


def _instead(model_type: str) -> str:
    """Return what to use instead of the Megatron backend for this type, as a sentence."""
    if fsdp_refusal(model_type, padded=False) is None:
        return "Use --train-backend fsdp"
    never = fsdp_refusal(model_type, padded=True)
    return never or "Use --train-backend fsdp --qkv-format bshd"
