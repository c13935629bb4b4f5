"""Count the parameters of a Hugging Face model by part, on the meta device."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from slime.backends.model_size.rank_model import WholeModel
from slime.data.tokenizer import load_hf_config

# A parameter belongs to the part of the first pattern that matches its name.
_PARTS = (
    ("embedding", r"embed_tokens|wte"),
    ("head", r"lm_head"),
    ("experts", r"\.experts\."),
    ("router", r"router|\.gate\."),
    ("shared", r"shared_expert"),
    ("kv", r"self_attn\.(k_proj|v_proj)"),
    ("latent", r"self_attn\.(q_a_proj|kv_a_proj)"),
    ("other", r"norm"),
    ("attention", r"self_attn|attn"),
    ("mlp", r"\.mlp\."),
)


def count_whole(folder: str) -> WholeModel:
    model = _skeleton(folder)
    by_part: dict[str, int] = {}
    layers: dict[str, int] = {}
    for name, param in model.named_parameters():
        part = _part(name)
        by_part[part] = by_part.get(part, 0) + param.numel()
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer:
            layers[layer[1]] = layers.get(layer[1], 0) + param.numel()
    largest = max(
        param.numel() for name, param in model.named_parameters() if "experts" not in name
    )
    return WholeModel(
        total=sum(by_part.values()),
        by_part=by_part,
        layer=max(layers.values(), default=0),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        largest_tensor=largest,
    )


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS if re.search(pattern, name)), "other")


def _skeleton(folder: str) -> Any:
    config = _read(folder)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )


def _read(folder: str) -> PretrainedConfig:
    raw = PretrainedConfig.get_config_dict(folder)[0]
    if raw.get("model_type") == "mimo":  # Qwen2 with an extra MTP layer, which is not trained
        fields = {k: v for k, v in raw.items() if k not in ("model_type", "architectures")}
        return Qwen2Config(**fields)
    config = load_hf_config(folder)
    return getattr(config, "text_config", config)
