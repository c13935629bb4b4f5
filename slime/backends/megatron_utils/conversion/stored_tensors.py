"""Read full Megatron tensors of a torch_dist checkpoint by their names on one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from slime.backends.checkpoint_reader import FileCheck, Slice, read_slices
from slime.backends.megatron_utils.checkpoint import refuse_other_format
from slime.backends.megatron_utils.hf_weights.rules import canonical
from slime.backends.megatron_utils.vision import VISUAL
from slime.core.errors import UserError

_ALL_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.")
_EXPERTS = ".mlp.experts.experts."
_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")  # of gated delta nets


class StoredTensors:
    """Full Megatron tensors in the `iter_...` folder of a checkpoint, by their names on one rank.

    Megatron stores the experts of a layer in one tensor, and may store all layers in one; a tensor
    of one layer and one expert is then a slice of it. Of projections and convolutions of gated delta
    nets it stores the sections of rows one by one: `in_proj.weight.query`, `in_proj.weight.key`, ...
    With `verified` the caller has compared the files with their checksums, which reads all of them.
    """

    def __init__(self, folder: str | Path, *, verified: bool = False) -> None:
        self._folder = str(folder)
        if not (Path(folder) / "metadata.json").is_file():
            raise UserError(f"{folder} is not a torch_dist checkpoint: it has no metadata.json")
        if not verified:
            FileCheck().verify(folder)
        refuse_other_format(folder)
        dist_checkpointing.load_common_state_dict(self._folder)  # refuses objects, as a run does
        self._places: dict[str, _StoredTensor] = {}
        self._sections: dict[str, list[str]] = {}
        for key, tensor in dist_checkpointing.load_tensors_metadata(self._folder).items():
            if key.startswith(("optimizer.", "chained_", "fp8.")) or "_extra_state" in key:
                continue
            assert isinstance(tensor, ShardedTensor), "only tensors are requested"
            self._add(key, tensor)
        self._join_sections()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[0].shape

    def has(self, name: str) -> bool:
        return self._pattern(name) in self._places

    def num_experts(self, name: str) -> int:
        return self._find(name)[0].experts or 1

    def num_mtp_layers(self) -> int:
        """Return how many multi-token-prediction layers were trained."""
        found = [_MTP.match(name) for name in self._places]
        return max((int(match[1]) + 1 for match in found if match), default=0)

    def has_tower(self) -> bool:
        """Return whether a vision tower was trained."""
        return any(name.startswith(VISUAL) for name in self._places)

    def nbytes(self, name: str) -> int:
        place = self._find(name)[0]
        return torch.Size(place.shape).numel() * place.dtype.itemsize

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read several tensors at once, as every read scans the checkpoint's whole index."""
        keys = {name: self._sections.get(name) or [name] for name in names}
        wanted = {key: self._slice(key) for parts in keys.values() for key in parts}
        found = read_slices(self._folder, wanted)
        return {
            name: found[name] if parts == [name] else torch.cat([found[key] for key in parts])
            for name, parts in keys.items()
        }

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
        place = _StoredTensor(key, layers, experts, shape, tensor.dtype)
        self._places[canonical(name)] = place

    def _join_sections(self) -> None:
        """Add a tensor of the rows of all sections, in the order of `_SECTIONS`."""
        for name in list(self._places):
            whole, _, section = name.rpartition(".")
            if section in _SECTIONS and whole.endswith(".weight"):
                self._sections.setdefault(whole, []).append(name)
        for whole, names in self._sections.items():
            names.sort(key=lambda name: _SECTIONS.index(name.rpartition(".")[2]))
            first = self._places[names[0]]
            rows = sum(self._places[name].shape[0] for name in names)
            self._places[whole] = replace(first, shape=(rows, *first.shape[1:]))

    def _find(self, name: str) -> tuple[_StoredTensor, int, int]:
        """Return where a tensor is stored, and the indices of its layer and expert there."""
        pattern = self._pattern(name)
        if pattern not in self._places:
            raise UserError(f"{self._folder} has no tensor {name}")
        layer, expert = _LAYER.match(name), re.search(r"\.local_experts\.(\d+)\.", name)
        place = self._places[pattern]
        return place, int(layer[1]) if layer else 0, int(expert[1]) if expert else 0

    def _pattern(self, name: str) -> str:
        name = re.sub(r"\.local_experts\.\d+\.", ".local_experts.*.", name)
        return name if name in self._places else _LAYER.sub("decoder.layers.*.", name)

    def _slice(self, name: str) -> Slice:
        place, layer, expert = self._find(name)
        axes = ((place.layers, layer), (place.experts, expert))
        offsets = tuple(index for count, index in axes if count)
        return Slice(key=place.key, offsets=offsets, shape=place.shape, dtype=place.dtype)


@dataclass(frozen=True)
class _StoredTensor:
    key: str
    layers: int | None  # size of the first dimension, None if the tensor is of one layer
    experts: int | None  # size of the next dimension
    shape: tuple[int, ...]  # of one layer and expert
    dtype: torch.dtype
