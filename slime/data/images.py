"""Read images of prompts, and make the tokens, pixels and MRoPE positions of a vision model from them.

An image is kept as the bytes of its file. The tokenizer writes one placeholder per image, which is
repeated once per token of the image. An image of 4 x 8 patches, where each 2 x 2 become one token:

    tokens     7 [start] [image] [image] ... (8 of them) [end] 9
    positions  text counts on: 0, 1, then (2, 2..3, 2..5) in time, row and column, then 6, 7

Text after an image continues at the position after its largest row or column.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from slime.core.batches import Pixels
from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample
from slime.utils.untrusted_files import read_regular

__all__ = ["ImageProcessor", "Pixels", "content_hash", "load_image_processor", "read_image"]

MAX_BYTES = 32 << 20  # of one image file
MAX_PIXELS = 1 << 26  # of one image before it is resized
_MAX_SCANS = 32  # of a progressive JPEG; each updates all pixels
_MAX_CHUNKS = 1 << 15  # of a PNG
_IMAGE_PARTS = ("image", "image_url")  # types of a message's parts
_MARK = "<image>"  # in a prompt whose images are in a column
_MAGIC_BYTES = {b"\x89PNG": "png", b"\xff\xd8": "jpeg"}
_FORMATS = ("PNG", "JPEG", "WEBP")
_THUMBNAIL = 160  # pixels of its longer side
_ORIENTATION = 0x0112  # EXIF tag: rotation of the camera
_CACHED_BYTES = 1 << 30  # of pixels that a process keeps


def read_image(source: Any, folder: Path, allowed: str | None = None) -> bytes:
    """Return the bytes of an image that a row gives: bytes, a data URI, or a path below `folder`
    or `allowed`.

    Parquet files of Hugging Face store {"bytes": ..., "path": ...}. An EXIF rotation is applied to
    the pixels, because not every reader applies it.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str):
        is_data = source.startswith("data:")
        source = _from_data_uri(source) if is_data else _from_file(source, folder, allowed)
    if not isinstance(source, bytes):
        raise UserError(
            f"an image is given as {type(source).__name__}; expected a path, bytes or a data URI"
        )
    image = open_image(source)
    try:
        if image.getexif().get(_ORIENTATION, 1) == 1:
            return source
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(image)
        data = _saved(upright, "PNG")
        # A photo is several times larger as a PNG, and may then be refused wherever it is opened.
        return data if len(data) <= MAX_BYTES else _saved(upright.convert("RGB"), "JPEG")
    except Exception:  # broken EXIF of an image that can be decoded: use it without rotation
        return source


def _saved(image: Any, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, quality=90)
    return file.getvalue()


def take_images(
    prompt: str | list[dict[str, Any]], column: Any
) -> tuple[str | list[dict[str, Any]], list[Any]]:
    """Return the prompt with a part per image in its messages, and the images in order, unread.

    Parts without data, and every `<image>` in a text, are filled from the row's column. A row without
    images keeps its text, which may then contain `<image>`.
    """
    given = column if isinstance(column, list) else [] if column is None else [column]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not all(isinstance(message, dict) for message in messages):
        raise UserError("a prompt is a text or a list of messages with role and content")
    rest, found = iter(given), []
    converted = [_with_parts(message, rest, found, marked=bool(given)) for message in messages]
    left = len(list(rest))
    if left:
        raise UserError(
            f"{len(given)} images but only {len(given) - left} <image> or parts of type image in the prompt"
        )
    return (converted if found else prompt), found


def has_images(prompt: str | list[dict[str, Any]]) -> bool:
    """Return whether messages have parts that are images."""
    messages = [] if isinstance(prompt, str) else prompt
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(
        isinstance(part, dict) and part.get("type") in _IMAGE_PARTS
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _with_parts(
    message: dict[str, Any], rest: Iterator[Any], found: list[Any], *, marked: bool
) -> dict[str, Any]:
    """Return the message with parts {"type": "image"}; their sources are appended to `found`."""
    content = message.get("content")
    if isinstance(content, str):
        texts = content.split(_MARK) if marked else [content]
        if len(texts) == 1:
            return message
        content = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            content += [{"type": "image"}, {"type": "text", "text": text}]
        content = [part for part in content if part.get("text") != ""]
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS:
            source = part_source(part)
            source = next(rest, None) if source is None else source
            if source is None:
                raise UserError("the prompt has more <image> or parts of type image than images")
            found.append(source)
            part = {"type": "image"}
        elif isinstance(part, dict):  # parquet files have all keys in all parts
            part = {key: value for key, value in part.items() if value is not None}
        parts.append(part)
    return {**message, "content": parts}


def part_source(part: dict[str, Any]) -> Any:
    """Return the source of a part {"type": "image", "image": ...} or {"type": "image_url", ...}."""
    source = part.get("image")
    if source is None:
        source = part.get("image_url")
        source = source.get("url") if isinstance(source, dict) else source
    return source


def _from_data_uri(text: str) -> bytes:
    """Decode data:image/png;base64,... ; other encodings are refused."""
    head, _, body = text.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise UserError(f"{text[:40]!r}: an image as a data URI begins data:image/png;base64,")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:  # of binascii, or characters outside ASCII
        raise UserError(f"{text[:40]!r}: its base64 is broken: {error}") from None


def _from_file(text: str, folder: Path, allowed: str | None) -> bytes:
    if "://" in text:
        raise UserError(
            f"{text[:80]!r}: images are not downloaded; give a path, bytes or a data URI"
        )
    path = Path(os.path.abspath(folder / text))
    roots = (folder, *((Path(allowed),) if allowed else ()))
    if not any(path.is_relative_to(os.path.abspath(root)) for root in roots):
        raise UserError(  # rows are untrusted
            f"the image {text[:80]!r} is not below {folder}, the folder of the data file: move it, or add "
            f"--allowed-local-media-path {path.parent}"
        )
    try:
        return read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the image {text[:200]!r} cannot be read: {reason}") from None


def open_image(data: bytes) -> Any:
    """Return the decoded PIL image; raise UserError if it is broken, too large or animated."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need Pillow: pip install 'slime[vision]'") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"an image of {len(data) >> 20} MiB; the limit is {MAX_BYTES >> 20} MiB")
    _check_parts(data)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size  # known before anything is decoded
        if width * height > MAX_PIXELS:
            raise UserError(
                f"an image of {width} x {height} pixels; the limit is {MAX_PIXELS:,} pixels"
            )
        if getattr(image, "n_frames", 1) > 1:
            raise UserError("the image has several frames: give one still image per frame")
        image.load()
    except UserError:
        raise
    except Exception as error:  # decoders of untrusted bytes raise nearly anything
        kinds = ", ".join(_FORMATS)
        raise UserError(f"an image that cannot be decoded as {kinds}: {error}") from None
    return image


def _check_parts(data: bytes) -> None:
    """Refuse a JPEG with too many scans or a PNG with too many chunks: small files can take long to decode."""
    count, most = 0, _MAX_CHUNKS
    if data.startswith(b"\xff\xd8"):
        count, most = data.count(b"\xff\xda"), _MAX_SCANS
    elif data.startswith(b"\x89PNG"):
        at = 8
        while at < len(data) and count <= most:
            at += 12 + int.from_bytes(data[at : at + 4], "big")
            count += 1
    if count > most:
        raise UserError(f"an image of over {most} scans (JPEG) or chunks (PNG)")


def given_tokens(sample: Sample) -> list[int]:
    """Return the tokens with -1 for generated ones, where a placeholder stands for no image."""
    start = len(sample.tokens) - sample.response_length
    mask = sample.loss_mask or [1] * sample.response_length
    response = zip(sample.tokens[start:], mask, strict=True)
    return sample.tokens[:start] + [-1 if trained else token for token, trained in response]


@lru_cache(maxsize=8)
def placeholders_of(path: str) -> frozenset[int]:
    """Return the placeholders of images and videos of a model's folder; none for a model that takes neither."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    tokens = (config.get(name) for name in ("image_token_id", "video_token_id"))
    return frozenset(token for token in tokens if isinstance(token, int))


def wrote_placeholder(sample: Sample, path: str) -> bool:
    """Return whether the model itself has written the placeholder of an image or a video into the response."""
    placeholders = placeholders_of(path)
    if placeholders.isdisjoint(sample.tokens):
        return False
    rows = zip(sample.tokens, given_tokens(sample), strict=True)
    return any(given == -1 and token in placeholders for token, given in rows)


def thumbnail(data: bytes) -> bytes:
    """Return a small PNG of the pixels alone, without metadata of the file."""
    image = open_image(data).convert("RGB")
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return _saved(image, "PNG")


def data_uri(data: bytes) -> str:
    """Return an image as data:image/png;base64,... , with the type of its magic bytes."""
    kind = next((kind for start, kind in _MAGIC_BYTES.items() if data.startswith(start)), "webp")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def content_hash(data: bytes) -> str:
    """Return the hash by which equal images are recognised."""
    return hashlib.sha256(data).hexdigest()


@lru_cache(maxsize=8)
def load_image_processor(path: str) -> ImageProcessor:
    """Return the processor of a model's folder; raise ConfigError for a model that takes no images."""
    return ImageProcessor(path)


class ImageProcessor:
    """Turns the images of one model's prompts into tokens, pixels and positions; thread-safe."""

    def __init__(self, path: str) -> None:
        config = json.loads((Path(path) / "config.json").read_text())
        vision = config.get("vision_config") or {}
        if "image_token_id" not in config or "spatial_merge_size" not in vision:
            raise ConfigError(
                f"--hf-checkpoint {path}: a {config.get('model_type')} model takes no images"
            )
        from transformers import AutoImageProcessor

        try:
            # Not torchvision's, which rounds differently: the pixels are the same on every machine.
            self._hf: Any = AutoImageProcessor.from_pretrained(
                path, backend="pil", trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--hf-checkpoint {path}: its preprocessor_config.json cannot be used: {error}"
            ) from None
        self.image_token: int = config["image_token_id"]
        self.merge: int = vision["spatial_merge_size"]
        self._cached: OrderedDict[str, Pixels] = OrderedDict()
        self._lock = Lock()

    def pixels(self, data: bytes) -> Pixels:
        """Return the pixels of an image; those of recent images are kept."""
        key = content_hash(data)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        try:
            found = self._hf(images=[open_image(data).convert("RGB")], return_tensors="np")
        except ValueError as error:  # such as an aspect ratio over 200
            raise UserError(f"the model's image processor refuses an image: {error}") from None
        time, rows, columns = (int(size) for size in found["image_grid_thw"][0])
        values = np.ascontiguousarray(found["pixel_values"], np.float32)
        pixels = Pixels(values=values, grid=(time, rows, columns), key=key)
        with self._lock:
            self._cached[key] = pixels
            while sum(p.values.nbytes for p in self._cached.values()) > _CACHED_BYTES:
                self._cached.popitem(last=False)
        return pixels

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def expand(self, tokens: list[int], images: list[bytes]) -> list[int]:
        """Repeat the placeholder of each image once per token of it."""
        return self.expand_masked(tokens, [0] * len(tokens), images)[0]

    def expand_masked(
        self, tokens: list[int], mask: list[int], images: list[bytes]
    ) -> tuple[list[int], list[int]]:
        """Repeat the placeholders of images, and their 0 in a loss mask, once per token of each image."""
        if any(on and token == self.image_token for token, on in zip(tokens, mask, strict=True)):
            raise UserError(
                "an assistant message holds an image or its placeholder, which cannot be trained on: images "
                "belong to the other roles"
            )
        if tokens.count(self.image_token) != len(images):
            raise UserError(
                f"the prompt has {tokens.count(self.image_token)} image placeholders and {len(images)} images"
            )
        counts = iter([self.num_tokens(self.pixels(data).grid) for data in images])
        repeats = [next(counts) if token == self.image_token else 1 for token in tokens]
        expanded = np.repeat([tokens, mask], np.asarray(repeats, int), axis=1)
        return expanded[0].tolist(), expanded[1].tolist()

    def places(self, tokens: list[int], grids: list[tuple[int, int, int]]) -> list[int]:
        """Return the index of each image's first token in the expanded tokens."""
        starts, at = [], 0
        for grid in grids:
            count = self.num_tokens(grid)
            try:
                start = tokens.index(self.image_token, at)
            except ValueError:
                raise UserError(
                    f"{len(grids)} images but fewer image placeholders in the tokens"
                ) from None
            if any(token != self.image_token for token in tokens[start : start + count]):
                raise UserError(f"an image of {count} tokens has fewer placeholders in the tokens")
            starts.append(start)
            at = start + count
        return starts

    def collapse(self, tokens: list[int], given: list[int], images: list[bytes]) -> list[int]:
        """Return the tokens with one placeholder per image, as SGLang takes them; `given` is from `given_tokens`."""
        grids = [self.pixels(data).grid for data in images]
        parts, at = [], 0
        for grid, start in zip(grids, self.places(given, grids), strict=True):
            parts += tokens[at : start + 1]
            at = start + self.num_tokens(grid)
        return parts + tokens[at:]

    def positions(self, tokens: list[int], grids: list[tuple[int, int, int]]) -> np.ndarray:
        """Return [tokens, 3]: the position of each token in time, row and column."""
        parts, at, here = [], 0, 0  # place in the tokens, next position
        for grid, start in zip(grids, self.places(tokens, grids), strict=True):
            parts.append(_counted(here, start - at))
            here += start - at
            shape = (grid[0], grid[1] // self.merge, grid[2] // self.merge)
            parts.append(here + np.indices(shape).reshape(3, -1).T)
            at = start + self.num_tokens(grid)
            here += max(shape[1:])
        parts.append(_counted(here, len(tokens) - at))
        return np.concatenate(parts).astype(np.int32)


def _counted(first: int, count: int) -> np.ndarray:
    return np.repeat(np.arange(first, first + count)[:, None], 3, axis=1)
