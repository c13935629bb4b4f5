"""A task that needs the image: how many squares are there? Makes the data, and a small Qwen3-VL for it.

    python examples/vision/counting.py FOLDER

FOLDER/images/0000.png ...      grey pictures of 32 x 32 pixels with one to six bright squares
FOLDER/{train,heldout,blank}.jsonl    {"prompt": "<image>How many?", "images": [...], "label": "3"}
FOLDER/model                    a random Qwen3-VL, warmed up by supervised steps until it often miscounts

`blank.jsonl` has the prompts of `heldout.jsonl` with the squares removed: no model can do better than
chance on it. `reward` is 1 for the right digit and 0 for anything else.
"""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SIZE, CELL, MOST = 32, 8, 6  # pixels of a picture, of one of its cells, and the largest count
PROMPT = "<image>How many?"
CHANCE = 1 / MOST
_SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TEMPLATE = """{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}\
{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""


async def reward(args: object, sample: Any) -> float:
    return float(sample.response == sample.label)


# ---- data


def draw(count: int, rng: random.Random) -> bytes:
    """Return a PNG with `count` bright squares in different cells of a dark picture."""
    pixels = np.full((SIZE, SIZE, 3), 40, np.uint8)
    for cell in rng.sample(range((SIZE // CELL) ** 2), count):
        row, column = divmod(cell, SIZE // CELL)
        top, left = row * CELL + 1, column * CELL + 1
        colour = [rng.randint(160, 255) for _ in range(3)]
        pixels[top : top + CELL - 2, left : left + CELL - 2] = colour
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_data(folder: Path, *, num_train: int, num_heldout: int, seed: int) -> None:
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "blank.png").write_bytes(draw(0, rng))
    for name, rows in (("train", num_train), ("heldout", num_heldout)):
        lines, blank = [], []
        for number in range(rows):
            count = rng.randint(1, MOST)
            image = f"images/{name}{number:04}.png"
            (folder / image).write_bytes(draw(count, rng))
            row = {"prompt": PROMPT, "images": [image], "label": str(count)}
            lines.append(json.dumps(row))
            blank.append(json.dumps({**row, "images": ["images/blank.png"]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        if name == "heldout":
            (folder / "blank.jsonl").write_text("\n".join(blank) + "\n")


# ---- model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return one token per byte, with the special tokens of a vision model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=_SPECIAL[0], pad_token=_SPECIAL[0]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    start, end, image, video = tokenizer.convert_tokens_to_ids(_SPECIAL[1:])
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "initializer_range": 0.05, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 48, "intermediate_size": 96, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "initializer_range": 0.05,
    }  # fmt: skip
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=False,
        )
    )


def make_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE},
    )  # fmt: skip


def warm_up(model: Any, tokenizer: Any, processor: Any, *, until: float, seed: int) -> float:
    """Train on right answers until `until` of the sampled answers are right; return that share."""
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    prompt = tokenizer.encode(
        "<|vision_start|>" + "<|image_pad|>" * (SIZE // CELL) ** 2 + "<|vision_end|>How many?"
    )
    share = 0.0
    for step in range(2000):
        counts = [rng.randint(1, MOST) for _ in range(32)]
        pictures = [Image.open(io.BytesIO(draw(count, rng))) for count in counts]
        pixels = processor(images=pictures, return_tensors="pt")
        answers = [[tokenizer.encode(str(count))[0], tokenizer.eos_token_id] for count in counts]
        ids = torch.tensor([prompt + answer for answer in answers])
        logits = model(
            input_ids=ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **pixels
        ).logits[:, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(2, ids[:, len(prompt) :, None]).squeeze(2)
        optimizer.zero_grad()
        (-log_probs.mean()).backward()
        optimizer.step()
        share = 0.9 * share + 0.1 * float(log_probs.sum(1).exp().mean().detach())
        if step % 20 == 0:
            print(f"warm-up step {step}: {share:.2f} of the answers are right", flush=True)
        if share >= until:
            break
    return share


def make_task(
    folder: Path, *, num_train: int = 512, num_heldout: int = 128, seed: int = 0
) -> float:
    """Write data and the warmed-up model; return the share of its answers that are right."""
    write_data(folder, num_train=num_train, num_heldout=num_heldout, seed=seed)
    tokenizer, processor = make_tokenizer(), make_processor()
    model = make_model(tokenizer, seed)
    share = warm_up(model, tokenizer, processor, until=0.3, seed=seed)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder / "model")
    return share


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/vision/counting.py FOLDER")
    print(f"{make_task(Path(sys.argv[1])):.2f} of the answers are right before training")
