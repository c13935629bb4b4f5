"""Shapes, random checkpoints and loads of the engine benchmarks.

A checkpoint is a config.json without weights: engines make random ones, unless `write_weights` adds a file of them.
Models with a vision tower also get a byte tokenizer and the processors' files, which SGLang reads at its start
whatever it is asked.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from slime.runlog.perf_metrics import ModelShape  # noqa: E402

NUM_REQUESTS = 256
LONG = (39, 7168, 1024)  # requests, tokens of a prompt and of a response
IMAGES = (32, 8, 448, 128)  # images, samples of each, pixels of a side, tokens of a response
MEMORY_RATE, MATMUL_RATE = 4.3e12, 790e12
COMMON = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
SHAPES = {
    "0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
SHAPES["tiny"] = {
    **SHAPES["0.6b"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
HYBRID = {  # three of four layers are gated delta nets
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "tie_word_embeddings": False,
}
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
SHAPES |= {
    "qwen3.5-27b": {
        **HYBRID,
        **_QWEN3_5,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3-next": {  # all 48 layers are 160 GB: give --layers
        **HYBRID,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
    },
    "tiny-hybrid": {
        **HYBRID,
        **_QWEN3_5,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
}
# SGLang has Qwen3.5 with its vision tower alone; for text this one is as small as it can be.
_SMALLEST_TOWER = {
    "depth": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
_VL_ROPE = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_interleaved": True,
    "mrope_section": [24, 20, 20],
}
_VL = {"model_type": "qwen3_vl_text", "max_position_embeddings": 262144, "rope_theta": 5e6}
_VL |= {"rope_parameters": _VL_ROPE, "rope_scaling": _VL_ROPE, "tie_word_embeddings": True}
SHAPES |= {
    "qwen3-vl-2b": {
        **_VL,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "tiny-vl": {
        **_VL,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
        "dtype": "float32",
    },
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tiny-vl": {
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
_BLOCK = (16 << 20) + 1  # elements of the block that random weights repeat
PATCHES = {"patch_size": 16, "temporal_patch_size": 2}
# Ids of the byte tokenizer; the published ones are other numbers of the same tokens.
VISION_START, VISION_END, IMAGE, VIDEO = 258, 259, 260, 261
LETTERS = range(
    64, 90
)  # a to z: SGLang makes text of the tokens beside an image, and tokens of it again
# prompt_ids and max_new_tokens; of some lora_path, or image_data and the prompt with one placeholder (sglang_ids)
Row = dict[str, Any]


def text_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    config = {**COMMON, **SHAPES[shape]}
    return {**config, "num_hidden_layers": layers or config["num_hidden_layers"]}


def write_checkpoint(folder: Path, shape: str, layers: int | None = None) -> dict[str, Any]:
    """Write what an engine needs to start with random weights; return the config of the language half."""
    config = text_config(shape, layers)
    folder.mkdir(parents=True)
    published = _published(config, TOWERS.get(shape, _SMALLEST_TOWER))
    (folder / "config.json").write_text(json.dumps(published))
    if "vision_config" in published:
        _write_processors(folder)
    return config


def write_weights(folder: Path) -> int:
    """Write random weights in bf16 beside the config.json of a dense model; return the bytes of the file.

    Every matrix is one random block, written again and again: eight gigabytes take a few seconds. The block's length
    is no multiple of a row, so that rows of a matrix differ.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    block = memoryview(_bf16_bytes(torch.randn(_BLOCK, generator=torch.manual_seed(0)) * 0.02))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for tensor in tensors.values():
            if tensor.ndim == 1:
                file.write(_bf16_bytes(torch.ones(tensor.shape)))
                continue
            left = 2 * tensor.numel()
            while left:
                left -= file.write(block[:left])
    return 8 + len(words) + end


def _bf16_bytes(tensor: Any) -> bytes:
    import torch

    return tensor.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def _published(config: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """Return the config as published: those of models with a vision tower hold two."""
    name = {"qwen3_5_text": "Qwen3_5", "qwen3_vl_text": "Qwen3VL"}.get(config["model_type"])
    if name is None:
        return config
    kind = config["model_type"].removesuffix("_text")
    vision = {**PATCHES, "spatial_merge_size": 2, "in_channels": 3, **tower}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "dtype": config["dtype"],
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "text_config": config,
        "vision_config": {**vision, "model_type": kind, "out_hidden_size": config["hidden_size"]},
    }


def _write_processors(folder: Path) -> None:
    """Write the files of Qwen3-VL's processor as they are published, and a tokenizer of bytes."""
    from tests.tiny_vision import save_tokenizer

    save_tokenizer(folder)
    shared = {**PATCHES, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    shared["processor_class"] = "Qwen3VLProcessor"
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps({**shared, **content}))


def make_rows(load: str, tiny: bool, checkpoint: Path, seed: int = 0) -> list[Row]:
    """Return the requests of one pass; those with images show others in every pass, as engines keep their features."""
    if load == "images":
        return make_image_load(checkpoint, *((2, 2, 64, 4) if tiny else IMAGES), seed=seed)
    if load == "long":
        return make_long_load(*((2, 40, 8) if tiny else LONG))
    return make_load(tiny)


def make_load(tiny: bool = False) -> list[Row]:
    rng = random.Random(0)
    if tiny:
        return [{"prompt_ids": list(range(1, 9 + i)), "max_new_tokens": 8} for i in range(4)]
    return [
        {
            "prompt_ids": [rng.randrange(150000) for _ in range(rng.randint(100, 1024))],
            "max_new_tokens": rng.randint(100, 1024),
        }
        for _ in range(NUM_REQUESTS)
    ]


def make_long_load(count: int, prompt: int, output: int) -> list[Row]:
    rng = random.Random(0)
    prompts = [[rng.randrange(300, 150000) for _ in range(prompt)] for _ in range(count)]
    return [{"prompt_ids": ids, "max_new_tokens": output} for ids in prompts]


def make_image_load(
    checkpoint: Path, groups: int, samples: int, pixels: int, output: int, *, seed: int
) -> list[Row]:
    """Return prompts of one image and 64 tokens of text, each asked for several samples."""
    from slime.data.images import data_uri, load_image_processor
    from tests.tiny_vision import make_image

    rng, processor = random.Random(seed), load_image_processor(str(checkpoint))
    rows: list[Row] = []
    for group in range(groups):
        image = make_image(pixels, pixels, seed=1000 * seed + group)
        text = [rng.choice(LETTERS) for _ in range(64)]
        prompt = [VISION_START, IMAGE, VISION_END, *text]
        row: Row = {"prompt_ids": processor.expand(prompt, [image]), "max_new_tokens": output}
        rows += [{**row, "sglang_ids": prompt, "image_data": [data_uri(image)]}] * samples
    return rows


def count_tokens(rows: list[Row]) -> tuple[int, int]:
    """Return the tokens of all prompts, images included, and of all responses."""
    pairs = _lengths(rows)
    return sum(prompt for prompt, _ in pairs), sum(output for _, output in pairs)


def _lengths(rows: list[Row]) -> list[tuple[int, int]]:
    return [(len(row["prompt_ids"]), row["max_new_tokens"]) for row in rows]


def limit_seconds(config: dict, rows: list[Row]) -> float:
    """Return the time if every step reads the cache of its requests and all weights once, prompts at full rate.

    States of gated delta nets are read and written in fp32.
    """
    shape = ModelShape.from_hf_config(config)
    kv_bytes = (shape.layers - shape.linear_layers) * shape.kv_heads * shape.head_dim * 2 * 2
    state_bytes = 2 * 4 * shape.linear_layers * shape.linear_state
    others = shape.num_experts - shape.experts_per_token  # of other tokens
    idle = 3 * shape.layers * others * shape.hidden * shape.expert_ffn
    weight_bytes = 2 * (shape.weights_per_token + idle)
    active = shape.weights_per_token - shape.vocab * shape.hidden
    pairs = _lengths(rows)
    seconds = sum(prompt for prompt, _ in pairs) * 2 * active / MATMUL_RATE
    for step in range(max(output for _, output in pairs)):
        running = [prompt + step for prompt, output in pairs if output > step]
        read = sum(running) * kv_bytes + len(running) * state_bytes + weight_bytes
        seconds += read / MEMORY_RATE
    return seconds
