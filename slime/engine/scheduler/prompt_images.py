"""The images of a prompt: where their tokens are, their RoPE positions, and keys for the prefix cache.

All image tokens have the same id. The prefix cache must distinguish them by content, so their keys are the
image's hash plus the offset in it. A prompt with an image of 4 tokens, in 2 rows:

    tokens       7 [start] [image] [image] [image] [image] [end]
    cache keys   7 [start]   h+0     h+1     h+2     h+3   [end]      h: negative, from the hash
    positions    0    1    (2,2,2) (2,2,3) (2,3,2) (2,3,3)   4        delta = -2: later ones are index - 2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime.core.errors import UserError
from slime.data.images import ImageProcessor, content_hash
from slime.engine.scheduler.sampling_params import RequestError

_MOST_TOKENS = 1 << 32  # of one image: offsets of different images never meet


@dataclass(frozen=True, kw_only=True)
class PlacedImage:
    """An image whose tokens are `start` .. `start + count` of the prompt."""

    data: bytes
    digest: str
    start: int
    count: int


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Tokens first .. first + count of an image are the tokens at .. at + count of a forward."""

    image: PlacedImage
    first: int
    at: int
    count: int

    def within(self, start: int, count: int) -> list[ImageRows]:
        """Return the part inside tokens start .. start + count, renumbered for a forward of only those."""
        low, high = max(self.at, start), min(self.at + self.count, start + count)
        if low >= high:
            return []
        first = self.first + low - self.at
        return [ImageRows(image=self.image, first=first, at=low - start, count=high - low)]


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptImages:
    """The images of a prompt, shared by all its samples."""

    placed: tuple[PlacedImage, ...]
    keys: list[int]  # of the prompt's tokens in the prefix cache
    positions: np.ndarray  # [prompt tokens, 3] int32: time, row and column

    @property
    def delta(self) -> int:
        """Return RoPE position minus index for tokens after the prompt."""
        return int(self.positions.max()) + 1 - len(self.positions)

    def rope_positions(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens start .. end, [end - start, 3] int32."""
        rest = np.arange(max(start, len(self.positions)), end, dtype=np.int32) + self.delta
        return np.concatenate([self.positions[start:end], np.repeat(rest[:, None], 3, axis=1)])

    def rows(self, start: int, end: int, at: int) -> list[ImageRows]:
        """Return the image tokens among the tokens start .. end, which are at `at` in a forward."""
        found: list[ImageRows] = []
        for image in self.placed:
            first, last = max(start, image.start), min(end, image.start + image.count)
            if first < last:
                offset, place = first - image.start, at + first - start
                found.append(ImageRows(image=image, first=offset, at=place, count=last - first))
        return found


def place_images(tokens: list[int], images: list[bytes], processor: ImageProcessor) -> PromptImages:
    """Find the tokens of each image in a prompt; raise RequestError if their number is wrong."""
    try:
        grids = [processor.pixels(data).grid for data in images]
    except UserError as error:
        raise RequestError(f"`image_data`: {error}") from None
    counts = [processor.num_tokens(grid) for grid in grids]
    found = tokens.count(processor.image_token)
    if found != sum(counts):
        raise RequestError(
            f"the prompt has {found} image tokens (id {processor.image_token}), and its {len(images)} images "
            f"need {sum(counts)}: repeat the placeholder of each image once per image token"
        )
    placed, keys, at = [], list(tokens), 0
    for data, count in zip(images, counts, strict=True):
        start = tokens.index(processor.image_token, at)
        at = start + count
        if tokens[start:at].count(processor.image_token) != count:
            raise RequestError(
                f"image {len(placed)} has {count} tokens, which are not contiguous in the prompt"
            )
        digest = content_hash(data)
        base = -1 - int(digest, 16) * _MOST_TOKENS
        keys[start:at] = range(base, base - count, -1)
        placed.append(PlacedImage(data=data, digest=digest, start=start, count=count))
    positions = processor.positions(tokens, grids)
    return PromptImages(placed=tuple(placed), keys=keys, positions=positions)
