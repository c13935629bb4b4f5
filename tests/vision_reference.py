"""What Hugging Face makes of texts with images, to compare engines with."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from slime.data.images import load_image_processor
from slime.data.tokenizer import load_tokenizer
from slime.engine.scheduler.request import Request
from tests.tiny_vision import IMAGE, PLACE, make_image

TOLERANCE = 1e-4
SIZES = [(32, 16), (16, 40), (8, 8), (40, 32)]


@functools.lru_cache(maxsize=4)
def reference(path: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def hf_inputs(path: Path, tokens: list[int], images: list[bytes]) -> dict[str, Any]:
    ids = torch.tensor([tokens])
    if not images:
        return {"input_ids": ids}
    pixels = [load_image_processor(str(path)).pixels(data) for data in images]
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat([torch.from_numpy(p.values) for p in pixels]),
        "image_grid_thw": torch.tensor([p.grid for p in pixels]),
    }


@torch.no_grad()
def log_probs_of(
    path: Path, tokens: list[int], images: list[bytes], prompt_len: int
) -> torch.Tensor:
    """Of all tokens but the first; up to an image token that was sampled, which Hugging Face refuses."""
    sampled = tokens[prompt_len:]
    cut = prompt_len + sampled.index(IMAGE) if IMAGE in sampled else len(tokens) - 1
    logits = reference(path)(**hf_inputs(path, tokens[:cut], images)).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1 : cut + 1, None]).squeeze(1)


def check(
    path: Path,
    requests: list[Request],
    images: list[list[bytes]],
    tolerance: float = TOLERANCE,
) -> None:
    for request, found in zip(requests, images, strict=True):
        expected = log_probs_of(path, request.token_ids, found, request.prompt_len)
        assert len(request.output_log_probs) == request.num_output
        scored = request.input_log_probs if request.logprob_start_len == 0 else []
        first = 0 if scored else request.prompt_len - 1
        values = torch.tensor(scored + request.output_log_probs)[: len(expected) - first]
        error = (values - expected[first:]).abs()
        assert not len(error) or error.max() < tolerance, (request.rid, error)


def encode(path: Path, text: str, images: list[bytes]) -> list[int]:
    ids = load_tokenizer(str(path)).encode(text, add_special_tokens=False)
    return load_image_processor(str(path)).expand(ids, images)


def make_prompts(
    path: Path, *counts: int, seed: int = 0
) -> tuple[list[list[int]], list[list[bytes]]]:
    """Random texts with so many images in them each."""
    rng = random.Random(seed)

    def text(most: int = 20) -> str:
        return "".join(rng.choice("abcdef ") for _ in range(rng.randint(1, most)))

    prompts, images = [], []
    for number, count in enumerate(counts):
        found = [make_image(*rng.choice(SIZES), seed=rng.randrange(1000)) for _ in range(count)]
        parts = [text() + PLACE for _ in found]
        prompts.append(encode(path, "".join(parts) + f"{number}" + text(), found))
        images.append(found)
    return prompts, images
