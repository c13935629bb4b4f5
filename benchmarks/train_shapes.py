"""Shapes of the training benchmarks, and models of them with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    "tiny-deep": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 36},  # as 4B
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64},
    "tiny-moe": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    },
    "30B-A3B-4L": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "tiny-hybrid": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
    "Qwen3.5-4B": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32},
    "Qwen3.5-9B-16L": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 16},
}
HYBRID = {  # gated delta nets in three of four layers
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "vocab_size": 248320,
}
HEADS = {
    "tiny": (4, 2),
    "tiny-deep": (1, 1),
    "0.6B": (16, 8),
    "4B": (32, 8),
    "14B": (40, 8),
    "32B": (64, 8),
    "tiny-moe": (4, 2),
    "30B-A3B-4L": (32, 4),
    "tiny-hybrid": (4, 2),
    "Qwen3.5-4B": (16, 4),
    "Qwen3.5-9B-16L": (16, 4),
}
VOCAB = 151936


def write_model(folder: Path, shape: str) -> Path:
    """Write config.json and random bf16 weights."""
    from transformers import AutoModelForCausalLM

    config = make_config(shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / shape)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the workers need the whole GPU
    return folder / shape


def write_config(folder: Path, shape: str) -> Path:
    make_config(shape).save_pretrained(folder / shape)
    return folder / shape


def make_config(shape: str) -> Any:
    from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

    heads, kv_heads = HEADS[shape]
    experts, hybrid = "num_experts" in SHAPES[shape], shape.startswith(("Qwen3.5", "tiny-hybrid"))
    family: Any = Qwen3_5TextConfig if hybrid else Qwen3MoeConfig if experts else Qwen3Config
    fields = {
        "vocab_size": VOCAB,
        "head_dim": 128,
        **(HYBRID if hybrid else {}),
        **({"vocab_size": 1024} if shape.startswith("tiny") else {}),
        **({"norm_topk_prob": True} if experts else {}),
        **SHAPES[shape],
    }
    return family(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131072,
        tie_word_embeddings=not experts and shape not in ("14B", "32B", "Qwen3.5-9B-16L"),
        dtype="bfloat16",
        **fields,
    )
