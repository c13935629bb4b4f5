"""Convert torch_dist to Hugging Face tensor by tensor; copy untrained ones from the original."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import torch

from slime.backends.checkpoint_reader import FileCheck
from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.core.errors import ConfigError, UserError
from slime.runlog.checkpoint_folder import CheckpointFolder
from slime.weights.buckets import NamedTensor
from slime.weights.hf_folder import FILE_BYTES, write_hf_folder

install_cpu_adapter()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from slime.backends.megatron_utils.checkpoint import (  # noqa: E402
    read_tensors,
    refuse_other_format,
)
from slime.backends.megatron_utils.conversion.setup import (  # noqa: E402
    ByteCount,
    process_group,
    progress,
)
from slime.backends.megatron_utils.hf_weights.export import with_copies  # noqa: E402
from slime.backends.megatron_utils.hf_weights.families import padded_weight_map  # noqa: E402
from slime.backends.megatron_utils.hf_weights.reader import HfReader  # noqa: E402
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap, canonical  # noqa: E402
from slime.backends.megatron_utils.model_config import read_config  # noqa: E402

Bucket = list[NamedTensor]

_ALL_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_MTP = re.compile(r"^mtp\.layers\.(\d+)\.")
_EXPERTS = ".mlp.experts.experts."
_EMBEDDING = "embedding.word_embeddings.weight"
_READ_BYTES = 1 << 30  # read from a checkpoint at a time


def main(argv: list[str]) -> int:
    """Run `--input-dir CHECKPOINT --output-dir FOLDER --origin-hf-dir FOLDER`."""
    options = _options(argv)
    source, output = _checkpoint(options.input_dir), Path(options.output_dir)
    config = read_config(options.origin_hf_dir)
    with process_group():
        stored = StoredTensors(source)
        weights = padded_weight_map(config, stored.shape(_EMBEDDING)[0], stored.num_mtp_layers())
        units = [
            unit
            for rule, layer in weights.in_layer_order()
            for unit in _units_of(rule, layer, stored)
        ]
        total = sum(stored.nbytes(name) for unit in units for name in unit.names)
        dtype = config.dtype or torch.bfloat16
        assert isinstance(dtype, torch.dtype), "transformers converts a name to the dtype"
        with progress("converting", total, shown=True) as count:
            origin = HfReader(options.origin_hf_dir)
            buckets = _buckets(units, stored, dtype, count)
            buckets = with_copies(buckets, weights.copies, origin.names())
            everything = chain(buckets, _untrained(weights, origin))
            # Weights are written unquantized, whatever the format of the original.
            write_hf_folder(
                str(output), options.origin_hf_dir, dtype, everything, writes=True, quantized=False
            )
    print(f"{output}: {config.model_type} of {source}")
    return 0


@dataclass(frozen=True)
class Unit:
    """A rule at one layer and expert, and the Megatron tensors it reads: all experts if stacked."""

    rule: Rule
    layer: int
    expert: int
    names: tuple[str, ...]


def _units_of(rule: Rule, layer: int, stored: StoredTensors) -> Iterator[Unit]:
    """Yield the units of a rule; none if the layer is of another kind."""
    if rule.load_only or not stored.has(rule.name(layer)):
        return
    experts = range(stored.num_experts(rule.name(layer))) if rule.per_expert else range(1)
    names = tuple(rule.name(layer, expert) for expert in experts)
    if rule.stacked:
        yield Unit(rule, layer, 0, names)
    else:
        for expert, name in zip(experts, names, strict=True):
            yield Unit(rule, layer, expert, (name,))


def _buckets(
    units: list[Unit], stored: StoredTensors, dtype: torch.dtype, count: ByteCount
) -> Iterator[Bucket]:
    """Yield lists of Hugging Face tensors, each about the size of a file."""
    bucket: Bucket = []
    for batch in _batches(units, stored):
        tensors = stored.read([name for unit in batch for name in unit.names])
        for unit in batch:
            bucket += _hf_tensors(unit, tensors, dtype)
            count.advance(sum(tensors[name].nbytes for name in unit.names))
        if sum(tensor.nbytes for _, tensor in bucket) > FILE_BYTES - _READ_BYTES:
            yield bucket
            bucket = []
    yield bucket


def _batches(units: list[Unit], stored: StoredTensors) -> Iterator[list[Unit]]:
    batch: list[Unit] = []
    size = 0
    for unit in units:
        nbytes = sum(stored.nbytes(name) for name in unit.names)
        if batch and size + nbytes > _READ_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(unit)
        size += nbytes
    if batch:
        yield batch


def _hf_tensors(unit: Unit, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Bucket:
    rule = unit.rule
    names = rule.hf_names(unit.layer, unit.expert)
    parts = [rule.mapping.to_hf(tensors[name]) for name in unit.names]
    whole = [
        torch.stack(of_one) if rule.stacked else of_one[0] for of_one in zip(*parts, strict=True)
    ]
    kind = torch.float32 if rule.fp32 else dtype
    return [(name, tensor.to(kind)) for name, tensor in zip(names, whole, strict=True)]


def _untrained(weights: WeightMap, reader: HfReader) -> Iterator[Bucket]:
    """Yield untrained tensors one at a time, as their number is not bounded."""
    for name in reader.names():
        if weights.is_untrained(name):
            yield [(name, reader.read(name))]


def _checkpoint(folder: str) -> Path:
    """Return the folder of a checkpoint: `folder` itself, or the newest one in it."""
    path = Path(folder)
    if (path / "metadata.json").is_file():
        return path
    saved = CheckpointFolder(path)
    if not saved.rollout_ids():
        raise ConfigError(f"--input-dir: {folder} is no checkpoint and has no complete one in it")
    return saved.path(saved.rollout_ids()[-1])


class StoredTensors:
    """Full Megatron tensors in the `iter_...` folder of a checkpoint, by their names on one rank.

    Megatron stores the experts of a layer in one tensor, and may store all layers in one; a tensor
    of one layer and one expert is then a slice of it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        if not (Path(folder) / "metadata.json").is_file():
            raise UserError(f"{folder} is not a torch_dist checkpoint: it has no metadata.json")
        FileCheck()(folder)
        refuse_other_format(folder)
        self._places: dict[str, _StoredTensor] = {}
        for key, tensor in dist_checkpointing.load_tensors_metadata(self._folder).items():
            if key.startswith(("optimizer.", "chained_", "fp8.")) or "_extra_state" in key:
                continue
            assert isinstance(tensor, ShardedTensor), "only tensors are asked for"
            self._add(key, tensor)

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

    def nbytes(self, name: str) -> int:
        place = self._find(name)[0]
        return torch.Size(place.shape).numel() * place.dtype.itemsize

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read several tensors at once, as every read scans the checkpoint's whole index."""
        wanted = {name: self._sharded(name) for name in names}
        loaded = read_tensors(wanted, self._folder, check_coverage=False)
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
        place = _StoredTensor(key, layers, experts, shape, tensor.dtype)
        self._places[canonical(name)] = place

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

    def _sharded(self, name: str) -> ShardedTensor:
        place, layer, expert = self._find(name)
        axes = [(n, i) for n, i in ((place.layers, layer), (place.experts, expert)) if n]
        offsets = [(axis, index, count) for axis, (count, index) in enumerate(axes)]
        data = torch.empty(place.shape, dtype=place.dtype)
        return ShardedTensor.from_rank_offsets(
            place.key, data, *offsets, prepend_axis_num=len(axes)
        )


@dataclass(frozen=True)
class _StoredTensor:
    key: str
    layers: int | None  # size of the first dimension, None if the tensor is of one layer
    experts: int | None  # size of the next dimension
    shape: tuple[int, ...]  # of one layer and expert
    dtype: torch.dtype


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="convert_torch_dist_to_hf.py", description=__doc__)
    parser.add_argument("--input-dir", required=True, help="iter_... folder, or the one it is in")
    parser.add_argument("--output-dir", required=True, help="where the Hugging Face folder goes")
    parser.add_argument(
        "--origin-hf-dir", required=True, help="config, tokenizer, untrained tensors"
    )
    options = parser.parse_args(argv)
    if not (Path(options.origin_hf_dir) / "config.json").is_file():
        raise ConfigError(f"--origin-hf-dir: {options.origin_hf_dir}/config.json does not exist")
    if Path(options.output_dir).resolve() == Path(options.origin_hf_dir).resolve():
        raise ConfigError("--output-dir is --origin-hf-dir: choose another folder")
    return options
