"""Tiny random vision-language checkpoints with a byte tokenizer, and images for them.

make_vision_checkpoint(tmp_path / "m")                      Qwen3-VL, 2 layers, tower of 2 blocks
make_vision_checkpoint(tmp_path / "m", "qwen3_5_moe")
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from slime.core.types import RolloutBatch, Sample
from slime.data.images import load_image_processor
from slime.rollout.train_data import image_columns
from tests.args import make_args
from tests.fsdp import make_rows
from tests.tiny import _DELTA_NET, _SHARED_EXPERT, EOS_ID, PAD_ID, VOCAB_SIZE, make_byte_tokenizer

VISION_START, VISION_END, IMAGE, VIDEO = 258, 259, 260, 261
_NAMES = {
    "<|vision_start|>": 258,
    "<|vision_end|>": 259,
    "<|image_pad|>": 260,
    "<|video_pad|>": 261,
}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
# As in tests/tiny.py, messages are joined with nothing around them; an image becomes its placeholder.
_TEMPLATE = f"""{{% for m in messages %}}{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}\
{{% for p in m['content'] %}}{{% if p['type'] in ('image', 'image_url') %}}{PLACE}\
{{% else %}}{{{{ p['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}{{% endfor %}}"""


def _rope(sections: list[int], **more: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"rope_parameters": {**rope, "mrope_interleaved": True}}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": _rope([4, 2, 2]),
    "qwen3_vl_moe": {**_EXPERTS, **_rope([4, 2, 2])},
    "qwen3_5": {**_DELTA_NET, **_rope([2, 1, 1], partial_rotary_factor=0.5)},
    "qwen3_5_moe": {
        **_DELTA_NET,
        **_SHARED_EXPERT,
        **_rope([2, 1, 1], partial_rotary_factor=0.5),
    },
}


def make_vision_checkpoint(
    path: str | Path,
    family: str = "qwen3_vl",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weight_scale: float = 3.0,
    **text_overrides: object,
) -> Path:
    """Write a random checkpoint with tokenizer and image processor under `path` and return the path.

    `weight_scale` multiplies every matrix but the embedding: with it the images change the logits.
    """
    path = Path(path)
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None,
        **_TEXT[family], **text_overrides,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        **({"deepstack_visual_indexes": [0, 1]} if "vl" in family else {}),
    }  # fmt: skip
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            weight.data.mul_(weight_scale)
    model.to(dtype).save_pretrained(path)
    save_tokenizer(path)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 64, "longest_edge": 4096},
    ).save_pretrained(path)  # fmt: skip
    return path


def save_tokenizer(path: Path) -> None:
    """Give the first reserved tokens of the byte tokenizer the names that vision models use."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(path)
    for file in (path / "tokenizer.json", path / "tokenizer_config.json"):
        text = file.read_text()
        for name, number in _NAMES.items():
            text = text.replace(f"<|reserved_{number - 258}|>", name)
        file.write_text(text)
    config = path / "tokenizer_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"})
    )


def make_image(width: int = 32, height: int = 16, *, seed: int = 0) -> bytes:
    """Return a PNG of random blocks; of 32 x 16 pixels it has 32 patches and 8 tokens."""
    small = np.random.default_rng(seed).integers(
        0, 256, (height // 4 or 1, width // 4 or 1, 3), np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def write_image_rows(folder: Path) -> Path:
    """Write a data file whose rows have one image, two images, and none; return its path."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(8):
        images = [f"{number}_{n}.png" for n in range(number % 3)]
        for n, name in enumerate(images):
            (folder / name).write_bytes(make_image(16 + 8 * number, 16 + 8 * n, seed=number))
        rows.append({"input": "<image>" * len(images) + f"count {number}", "images": images})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "label": "1"}) + "\n" for row in rows))
    return path


def make_image_rows(model: str, seed: int = 0) -> RolloutBatch:
    """Return the rows of tests/fsdp.py with images: in the prompt, in a later turn, shared, or none."""
    rows, processor = make_rows(seed), load_image_processor(model)
    images = [make_image(*size, seed=n) for n, size in enumerate([(32, 16), (16, 40), (8, 8)])]
    samples = []
    for row, tokens in enumerate(rows.tokens):
        count = int(rows.response_lens[row])
        given, response = tokens[:-count].tolist(), tokens[-count:].tolist()
        mask, old = list(rows.loss_masks[row]), list(rows.rollout_log_probs[row])
        files = []
        if row % 3 != 1:
            files.append(images[row % 2])
            given = [given[0], *processor.expand([VISION_START, IMAGE, VISION_END], files), *given]
        if row % 3 == 2:  # a tool's image in the middle of the response
            files.append(images[2])
            turn = processor.expand([VISION_START, IMAGE, VISION_END], files[-1:])
            half = count // 2
            response[half:half] = turn
            mask[half:half], old[half:half] = [0] * len(turn), [0.0] * len(turn)
        samples.append(
            Sample(
                tokens=given + response,
                response_length=len(response),
                loss_mask=mask,
                rollout_log_probs=old,
                multimodal_inputs={"images": files} if files else None,
            )
        )
    args = make_args(hf_checkpoint=model, multimodal_keys={"image": "images"})
    return replace(
        rows,
        tokens=[sample.tokens for sample in samples],
        response_lens=[sample.response_length for sample in samples],
        loss_masks=[sample.loss_mask for sample in samples],
        rollout_log_probs=[sample.rollout_log_probs for sample in samples],
        **image_columns(args, samples),
    )
