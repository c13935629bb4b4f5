"""torch_dist -> Hugging Face, tensor by tensor; what Megatron does not hold comes from the original."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from slime.backends.hf_folder import FILE_BYTES, write_hf_folder
from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.core.errors import ConfigError
from slime.runlog.checkpoint_folder import CheckpointFolder
from slime.weights.buckets import NamedTensor

install_cpu_adapter()

from slime.backends.megatron_utils.conversion.process_group import process_group  # noqa: E402
from slime.backends.megatron_utils.conversion.progress import ByteCount, progress  # noqa: E402
from slime.backends.megatron_utils.conversion.stored import StoredTensors  # noqa: E402
from slime.backends.megatron_utils.hf_weights.families import padded_weight_map  # noqa: E402
from slime.backends.megatron_utils.hf_weights.reader import HfReader  # noqa: E402
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap  # noqa: E402
from slime.backends.megatron_utils.model_config import read_config  # noqa: E402

Bucket = list[NamedTensor]

_EMBEDDING = "embedding.word_embeddings.weight"
_READ_BYTES = 1 << 30  # of a checkpoint at a time


def main(argv: list[str]) -> int:
    """`--input-dir CHECKPOINT --output-dir FOLDER --origin-hf-dir FOLDER`"""
    options = _options(argv)
    source, output = _checkpoint(options.input_dir), Path(options.output_dir)
    config = read_config(options.origin_hf_dir)
    with process_group():
        stored = StoredTensors(source)
        weights = padded_weight_map(config, stored.shape(_EMBEDDING)[0])
        units = list(_units(weights, stored))
        total = sum(stored.nbytes(name) for unit in units for name in unit.names)
        dtype = config.dtype or torch.bfloat16
        with progress("converting", total, shown=True) as count:
            buckets = _buckets(units, stored, dtype, count)
            untrained = _untrained(weights, HfReader(options.origin_hf_dir))
            everything = _chain(buckets, untrained)
            # The weights are written as they are, whatever the original was stored in.
            write_hf_folder(
                str(output), options.origin_hf_dir, dtype, everything, writes=True, quantized=False
            )
    print(f"{output}: {config.model_type} of {source}")
    return 0


@dataclass(frozen=True)
class Unit:
    """A rule at one place: the Megatron tensors that are read for it, of all experts if stacked."""

    rule: Rule
    layer: int
    expert: int
    names: tuple[str, ...]


def _units(weights: WeightMap, stored: StoredTensors) -> Iterator[Unit]:
    """Everything that becomes Hugging Face tensors, in the order of the layers."""
    first, *rest = weights.rules
    yield from _at(first, 0, stored)
    for layer in range(weights.num_layers):
        for rule in rest:
            if rule.per_layer:
                yield from _at(rule, layer, stored)
    for rule in rest:
        if not rule.per_layer:
            yield from _at(rule, 0, stored)


def _at(rule: Rule, layer: int, stored: StoredTensors) -> Iterator[Unit]:
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
    """Lists of about the size of a file."""
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
    """One at a time: nothing bounds how many there are."""
    for name in reader.names():
        if weights.is_untrained(name):
            yield [(name, reader.read(name))]


def _chain(*parts: Iterator[Bucket]) -> Iterator[Bucket]:
    for part in parts:
        yield from part


def _checkpoint(folder: str) -> Path:
    """The folder of one checkpoint: the one named, or the newest in it."""
    path = Path(folder)
    if (path / "metadata.json").is_file():
        return path
    saved = CheckpointFolder(path)
    if not saved.rollout_ids():
        raise ConfigError(f"--input-dir: {folder} is no checkpoint and has no complete one in it")
    return saved.path(saved.rollout_ids()[-1])


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
