"""`image_data` of requests: decodes data URIs into image files, one list per prompt.

Clients cannot make it read from disk or from the network.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slime.core.errors import UserError
from slime.data.images import ImageProcessor, read_image
from slime.engine.scheduler.prompt_images import PromptImages, place_images
from slime.engine.scheduler.sampling_params import RequestError

_PLACING_S = 20.0
Images = ImageProcessor | str  # str: why the engine does not support images


def read_image_data(body: Any, images: Images, deadline: float, context_len: int) -> Any:
    """Return the body with `image_data` as one list of image files per prompt; without images, unchanged.

    As in SGLang, a batch has one image or list of images per prompt, and a single image is for all prompts.
    """
    given = body.get("image_data") if isinstance(body, dict) else None
    if given in (None, "", []):
        return body
    key = "text" if body.get("text") is not None else "input_ids"
    prompts = body.get(key)
    nested = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    count = len(prompts) if nested and prompts else 1
    if not nested or not isinstance(given, list):
        files = [read_images(given, images, deadline, context_len)] * count
    elif len(given) == count:
        files = [read_images(group, images, deadline, context_len) for group in given]
    else:
        raise RequestError(f"`image_data` has {len(given)} entries for {count} prompts")
    return {**body, "image_data": files}


def read_images(group: Any, images: Images, deadline: float, context_len: int) -> list[bytes]:
    """Return the image files of one prompt, each accepted by the model's image processor.

    Reading stops as soon as the images have more tokens than the context.
    """
    sources = [] if group is None else group if isinstance(group, list) else [group]
    if not sources:
        return []
    processor = require_processor(images)
    files: list[bytes] = []
    num_tokens = 0
    for source in sources:
        if time.monotonic() > deadline:
            raise RequestError("decoding these images takes too long: send fewer of them at a time")
        if not isinstance(source, str) or not source.startswith("data:"):
            shown = f"{source[:40]!r}" if isinstance(source, str) else type(source).__name__
            raise RequestError(
                f"`image_data` has {shown}; images must be data URIs, data:image/png;base64,..."
            )
        try:
            files.append(read_image(source, Path()))
            num_tokens += processor.num_tokens(processor.pixels(files[-1]).grid)
        except UserError as error:
            raise RequestError(f"image {len(files)} of the prompt: {error}") from None
        if num_tokens > context_len:
            raise RequestError(
                f"the images are longer than the model's context length ({context_len} tokens)"
            )
    return files


def expand_prompts(prompts: list[list[int]], body: Any, images: Images) -> list[list[int]]:
    """Repeat the placeholder of each image in tokenized texts once per token of the image."""
    groups = body.get("image_data")
    if not groups:
        return prompts
    processor = require_processor(images)
    try:
        return [processor.expand(ids, group) for ids, group in zip(prompts, groups, strict=True)]
    except UserError as error:
        raise RequestError(str(error)) from None


def place_all(prompts: list[list[int]], body: Any, images: Images) -> list[PromptImages | None]:
    """Return the images of each prompt, None for text; raise RequestError if tokens and images do not match."""
    groups = body.get("image_data") or [[]] * len(prompts)
    if isinstance(images, str):
        return [None] * len(prompts)
    placed: list[PromptImages | None] = []
    deadline = time.monotonic() + _PLACING_S
    for ids, group in zip(prompts, groups, strict=True):
        if time.monotonic() > deadline:  # of thousands of prompts, each with the same large file
            raise RequestError("these images take too long: send fewer prompts at a time")
        wanted = group or images.image_token in ids
        placed.append(place_images(ids, group, images) if wanted else None)
    return placed


def require_processor(images: Images) -> ImageProcessor:
    if isinstance(images, str):
        raise RequestError(f"`image_data`: {images}")
    return images
