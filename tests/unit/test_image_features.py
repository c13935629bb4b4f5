"""Features of images are computed once by a frozen tower, whatever micro-batches show them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from slime.backends.backend import FeatureCache, run_tower
from slime.core.packing import pack
from slime.core.types import ParallelInfo, TrainBatch
from tests.tiny_vision import make_image_rows, make_vision_checkpoint


class Counting:
    """A tower that counts the images that it was given."""

    def __init__(self, tower: Any) -> None:
        self.tower, self.num_images = tower, 0
        self.spatial_merge_size = tower.spatial_merge_size

    def __call__(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        self.num_images += len(grid_thw)
        return self.tower(pixels, grid_thw=grid_thw)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def model(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / request.param
    return str(make_vision_checkpoint(folder, request.param))


def micro_batches(model: str, *rows: list[int]) -> list[TrainBatch]:
    batch = make_image_rows(model)
    batch.loss_weights = [mask.astype(np.float32) for mask in batch.loss_masks]
    return [pack(batch, part, ParallelInfo()) for part in rows]


@torch.no_grad()
def expected(tower: Any, batch: TrainBatch) -> list[torch.Tensor]:
    """Each image alone, by the tower itself."""
    counts = batch.image_grids.prod(-1).tolist()
    parts = [
        run_tower(tower, pixels, grid[None])
        for pixels, grid in zip(batch.pixel_values.split(counts), batch.image_grids, strict=True)
    ]
    return [torch.cat(layers) for layers in zip(*parts, strict=True)]


@pytest.mark.parametrize(("most_bytes", "times"), [(1 << 28, 1), (0, None)])
def test_features_are_those_of_the_tower(model, most_bytes, times):
    tower = Counting(AutoModelForImageTextToText.from_pretrained(model).model.visual)
    cache = FeatureCache(most_bytes)
    batches = micro_batches(model, [0, 2], [3, 5], [6, 8, 0])
    different = {key for batch in batches for key in batch.image_keys}
    assert len(different) == 3
    for _ in range(3):  # reference, old log-probs, training
        for batch in batches:
            found = cache.features(tower, batch, torch.float32)
            wanted = expected(tower.tower, batch)
            assert len(found) == len(wanted) == (3 if "qwen3_vl" in model else 1)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert not one.requires_grad
    shown = 3 * sum(len(batch.image_keys) for batch in batches)
    assert tower.num_images == (shown if times is None else times * len(different))
    cache.clear()
    cache.features(tower, batches[0], torch.float32)
    again = len(batches[0].image_keys)
    assert tower.num_images == again + (shown if times is None else len(different))
