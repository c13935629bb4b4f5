"""The vision tower: from images to the hidden states of their tokens.

The tower is the transformers module. It runs once per distinct image, on one image at a time, so its output
does not depend on other images; the outputs of recent images are cached.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from transformers import PreTrainedModel

from slime.data.images import ImageProcessor
from slime.engine.kernels.interface import ImageInputs
from slime.engine.scheduler.prompt_images import ImageRows, PlacedImage

CACHED_BYTES = 1 << 30  # of cached outputs


class VisionTower:
    def __init__(
        self, model: PreTrainedModel, processor: ImageProcessor, cached_bytes: int = CACHED_BYTES
    ) -> None:
        body: Any = model.model
        self._tower, self.processor = body.visual, processor
        self._device, self._dtype = model.device, model.dtype
        self._outputs: OrderedDict[str, torch.Tensor] = OrderedDict()  # by content
        self.cached_bytes = cached_bytes
        self.num_runs = 0

    @property
    def held_bytes(self) -> int:
        return sum(output.nbytes for output in self._outputs.values())

    def forget(self) -> None:
        """Drop the cached outputs, when the tower's weights change or memory is released."""
        self._outputs.clear()

    def inputs(self, rows: list[ImageRows]) -> ImageInputs | None:
        """Return the embeddings of the image tokens of a forward; None if there are none."""
        if not rows:
            return None
        parts = [self._output(r.image)[:, r.first : r.first + r.count] for r in rows]
        at = torch.cat([torch.arange(r.at, r.at + r.count) for r in rows])
        embeddings, *deepstack = torch.cat(parts, dim=1).unbind(0)
        at = at.to(self._device, non_blocking=True)
        return ImageInputs(at=at, embeddings=embeddings, deepstack=deepstack)

    def _output(self, image: PlacedImage) -> torch.Tensor:
        """Return [1 + D, tokens, H]: the embeddings, and the features for the first D layers."""
        found = self._outputs.get(image.digest)
        if found is not None:
            self._outputs.move_to_end(image.digest)
            return found
        found = self._run(image)
        self._outputs[image.digest] = found
        while self.held_bytes > self.cached_bytes:
            self._outputs.popitem(last=False)
        return found

    def _run(self, image: PlacedImage) -> torch.Tensor:
        pixels = self.processor.pixels(image.data)
        values = torch.from_numpy(pixels.values).to(self._device, self._dtype)
        grid = torch.tensor([pixels.grid], device=self._device)
        output = self._tower(values, grid_thw=grid, return_dict=True)
        self.num_runs += 1
        deepstack = getattr(output, "deepstack_features", None) or []
        return torch.stack([output.pooler_output, *deepstack])
