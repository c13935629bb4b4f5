"""Whole Megatron tensors out of a torch_dist checkpoint, read a few at a time.

Megatron stores the experts of a layer in one tensor, and may store all layers in one; a tensor of one
layer and one expert is then a slice of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from slime.backends.checkpoint_check import FileCheck
from slime.backends.checkpoint_reader import plain_refusals
from slime.backends.megatron_utils.checkpoint import refuse_other_format
from slime.backends.megatron_utils.hf_weights.rules import canonical
from slime.core.errors import UserError

_ALL_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERTS = ".mlp.experts.experts."


@dataclass(frozen=True)
class _Place:
    key: str
    layers: int | None  # in the first dimension, None where the tensor is of one layer
    experts: int | None  # in the next one
    shape: tuple[int, ...]  # of one layer and expert
    dtype: torch.dtype


class StoredTensors:
    """The model in the folder `iter_...` of a checkpoint, under the names of a model on one rank."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        if not (Path(folder) / "metadata.json").is_file():
            raise UserError(f"{folder} is not a torch_dist checkpoint: it has no metadata.json")
        FileCheck()(folder)
        refuse_other_format(folder)
        self._places: dict[str, _Place] = {}
        for key, tensor in dist_checkpointing.load_tensors_metadata(self._folder).items():
            if not key.startswith(("optimizer.", "chained_", "fp8.")) and "_extra_state" not in key:
                self._add(key, tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[0].shape

    def has(self, name: str) -> bool:
        return self._pattern(name) in self._places

    def num_experts(self, name: str) -> int:
        return self._find(name)[0].experts or 1

    def nbytes(self, name: str) -> int:
        place = self._find(name)[0]
        return torch.Size(place.shape).numel() * place.dtype.itemsize

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Several at once: every read looks at the checkpoint's whole index."""
        wanted = {name: self._sharded(name) for name in names}
        # Only this process reads, so nobody reads the rest.
        with plain_refusals():
            loaded = dist_checkpointing.load(wanted, self._folder, validate_access_integrity=False)
        return {name: loaded[name] for name in wanted}

    def _add(self, key: str, tensor: ShardedTensor) -> None:
        shape = tuple(tensor.global_shape)
        layers = experts = None
        name = key
        if _ALL_LAYERS.match(key):
            layers, shape = shape[0], shape[1:]
            name = _ALL_LAYERS.sub("decoder.layers.*.", name)
        if _EXPERTS in key:
            experts, shape = shape[0], shape[1:]
            name = name.replace(_EXPERTS, ".mlp.experts.local_experts.*.")
        place = _Place(key, layers, experts, shape, tensor.dtype)
        self._places[canonical(name)] = place

    def _find(self, name: str) -> tuple[_Place, int, int]:
        """Where a tensor lies, and the numbers of its layer and expert there."""
        pattern = self._pattern(name)
        if pattern not in self._places:
            raise UserError(f"{self._folder} has no tensor {name}")
        layer, expert = _LAYER.match(name), re.search(r"\.local_experts\.(\d+)\.", name)
        place = self._places[pattern]
        return place, int(layer[1]) if layer else 0, int(expert[1]) if expert else 0

    def _pattern(self, name: str) -> str:
        name = re.sub(r"\.local_experts\.\d+\.", ".local_experts.*.", name)
        return name if name in self._places else _LAYER.sub("decoder.layers.*.", name)

    def _sharded(self, name: str) -> ShardedTensor:
        place, layer, expert = self._find(name)
        axes = [(n, i) for n, i in ((place.layers, layer), (place.experts, expert)) if n]
        offsets = [(axis, index, count) for axis, (count, index) in enumerate(axes)]
        data = torch.empty(place.shape, dtype=place.dtype)
        return ShardedTensor.from_rank_offsets(
            place.key, data, *offsets, prepend_axis_num=len(axes)
        )
