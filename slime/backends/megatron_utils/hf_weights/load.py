"""Load the model chunks of this rank from Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime.backends.megatron_utils.hf_weights.local import (
    Layout,
    LocalWeight,
    current_layout,
    local_weights,
)
from slime.backends.megatron_utils.hf_weights.reader import TensorReader
from slime.backends.megatron_utils.hf_weights.rules import Match, WeightMap
from slime.core.errors import UserError


def load_hf(
    chunks: Sequence[torch.nn.Module],
    weights: WeightMap,
    reader: TensorReader,
    *,
    on_tensor: Callable[[LocalWeight], None] | None = None,
) -> None:
    """Load every local weight of `chunks`, reading only the shards of this rank.

    Before anything is changed, raise UserError for a tensor that is missing or has another shape.
    """
    layout = current_layout()
    targets = list(local_weights(chunks, weights, layout))
    for weight in targets:
        check_shape(weight, reader, layout)
    for weight in targets:
        with torch.no_grad():
            _fill(weight.tensor, weight.match, reader, layout)
        if on_tensor is not None:
            on_tensor(weight)


def shard_from_hf(
    match: Match, reader: TensorReader, layout: Layout, dtype: torch.dtype
) -> torch.Tensor:
    """Return the shard of one Megatron parameter that a rank of `layout` holds."""
    shapes = [reader.shape(name) for name in match.hf_names]
    shard = torch.empty(match.rule.mapping.shape(shapes, layout.part(match)), dtype=dtype)
    _fill(shard, match, reader, layout)
    return shard


def _fill(target: torch.Tensor, match: Match, reader: TensorReader, layout: Layout) -> None:
    part = layout.part(match)
    match.rule.mapping.fill(target, reader, match.hf_names, part, match.expert)


def check_shape(weight: LocalWeight, reader: TensorReader, layout: Layout) -> None:
    match = weight.match
    shapes = [reader.shape(name) for name in match.hf_names]
    shape = match.rule.mapping.shape(shapes, layout.part(match))
    if shape != tuple(weight.tensor.shape):
        found = ", ".join(
            f"{name} {list(shape)}" for name, shape in zip(match.hf_names, shapes, strict=True)
        )
        raise UserError(
            f"{found} does not fit the model that config.json describes: {weight.name} is "
            f"{list(weight.tensor.shape)} on this rank and would be {list(shape)}"
        )
