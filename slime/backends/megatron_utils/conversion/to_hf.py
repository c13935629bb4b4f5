"""Convert torch_dist to Hugging Face tensor by tensor; copy untrained ones from the original."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.core.errors import ConfigError, UserError
from slime.runlog.checkpoint_folder import find_checkpoint
from slime.weights.buckets import NamedTensor, batches, stored_names
from slime.weights.hf_folder import WeightFile, new_hf_folder, write_weight_file

install_cpu_adapter()

from slime.backends.megatron_utils.conversion.setup import (  # noqa: E402
    process_group,
    progress,
)
from slime.backends.megatron_utils.conversion.stored_tensors import StoredTensors  # noqa: E402
from slime.backends.megatron_utils.conversion.to_hf_options import (  # noqa: E402
    check_model,
    parse_options,
)
from slime.backends.megatron_utils.hf_weights.export import with_copies  # noqa: E402
from slime.backends.megatron_utils.hf_weights.families import padded_weight_map, with_tower  # noqa: E402
from slime.backends.megatron_utils.hf_weights.reader import HfReader  # noqa: E402
from slime.backends.megatron_utils.hf_weights.rules import Match, Rule, WeightMap  # noqa: E402
from slime.backends.megatron_utils.model_config import read_config  # noqa: E402

Bucket = list[NamedTensor]

_EMBEDDING = "embedding.word_embeddings.weight"
_READ_BYTES = 1 << 30  # read from a checkpoint at a time


def main(argv: list[str]) -> int:
    """Run `--input-dir CHECKPOINT --output-dir FOLDER --origin-hf-dir FOLDER`."""
    options = parse_options(argv)
    source, output = _checkpoint(options.input_dir), Path(options.output_dir)
    if options.force and _holds_something_else(output):
        raise UserError(f"--force: {output} holds no model: it is not replaced, remove it by hand")
    plan = Plan(
        source=str(source),
        origin=options.origin_hf_dir,
        file_bytes=options.chunk_size,
        add_missing=options.add_missing_from_origin_hf,
    )
    with process_group():
        conversion = Conversion(plan)
        check_model(options, conversion.config)
        conversion.report_missing()
        total = sum(conversion.nbytes(part) for file in conversion.files for part in file)
        # Weights are written unquantized, whatever the format of the original.
        with (
            progress("converting", total, shown=True) as advance,
            new_hf_folder(str(output), plan.origin, conversion.dtype, quantized=False) as files,
        ):
            for file in _write_files(conversion, files.folder, options.max_workers):
                files.add_written(file)
                advance(file.nbytes)
            if options.force and output.exists():
                shutil.rmtree(output)
    print(f"{output}: {conversion.config.model_type} of {source}")
    return 0


def _holds_something_else(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").exists()


@dataclass(frozen=True, kw_only=True)
class Unit(Match):
    """A rule at one layer and expert, and the Megatron tensors it reads: all experts if stacked."""

    names: tuple[str, ...]


Part = Unit | str  # of a file: a unit, or the name of a tensor that is copied from the original


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion reads, and the size of its files; a worker process gets this alone."""

    source: str
    origin: str
    file_bytes: int
    add_missing: bool


class Conversion:
    """The files of a conversion, planned from names and sizes, so that every process plans the same."""

    def __init__(self, plan: Plan, *, verified: bool = False) -> None:
        self.plan, self.config = plan, read_config(plan.origin)
        self.stored = StoredTensors(plan.source, verified=verified)
        self.origin = HfReader(plan.origin)
        weights = self.weights = padded_weight_map(
            self.config,
            self.stored.shape(_EMBEDDING)[0],
            self.stored.num_mtp_layers(),
            stored_names(plan.origin, self.config.model_type),
        )
        if self.stored.has_tower():
            weights = self.weights = with_tower(weights, plan.origin)
        dtype = self.config.dtype or torch.bfloat16
        assert isinstance(dtype, torch.dtype), "transformers converts a name to the dtype"
        self.dtype = dtype
        units = [
            unit
            for rule, layer in weights.in_layer_order()
            for unit in _units_of(rule, layer, self.stored)
        ]
        self.missing = _missing(weights, units, self.origin)
        copied = [name for name in self.origin.names() if weights.is_untrained(name)]
        copied += self.missing if plan.add_missing else []
        self.files = list(batches([*units, *copied], self.nbytes, plan.file_bytes))

    def report_missing(self) -> None:
        if self.missing and not self.plan.add_missing:
            print(
                f"{self.plan.source} has no {self.missing[0]} ({len(self.missing)} tensors of the original in "
                "all): --add-missing-from-origin-hf copies them",
                file=sys.stderr,
            )

    def write(self, number: int, folder: Path) -> WeightFile:
        """Write the file of this number, from 0, holding it and about 1 GiB more in memory."""
        bucket: Bucket = []
        for batch in batches(self.files[number], self._stored_bytes, _READ_BYTES):
            names = [name for part in batch if isinstance(part, Unit) for name in part.names]
            tensors = self.stored.read(names) if names else {}
            for part in batch:
                if isinstance(part, Unit):
                    bucket += _hf_tensors(part, tensors, self.dtype)
                else:
                    bucket.append((part, self.origin.read(part)))
        written = with_copies([bucket], self.weights.copies, self.origin.names())
        return write_weight_file(folder, number + 1, [one for part in written for one in part])

    def nbytes(self, part: Part) -> int:
        """Return the size of a part once converted, or somewhat more."""
        if isinstance(part, str):
            return prod(self.origin.shape(part)) * self.dtype.itemsize
        size = torch.float32.itemsize if part.rule.fp32 else self.dtype.itemsize
        return sum(prod(self.stored.shape(name)) * size for name in part.names)

    def _stored_bytes(self, part: Part) -> int:
        if isinstance(part, str):
            return self.nbytes(part)
        return sum(self.stored.nbytes(name) for name in part.names)


def _units_of(rule: Rule, layer: int, stored: StoredTensors) -> Iterator[Unit]:
    """Yield the units of a rule; none if the layer is of another kind."""
    if rule.load_only or not stored.has(rule.name(layer)):
        return
    experts = range(stored.num_experts(rule.name(layer))) if rule.per_expert else range(1)
    names = tuple(rule.name(layer, expert) for expert in experts)
    if rule.stacked:
        yield Unit(rule=rule, layer=layer, names=names)
    else:
        for expert, name in zip(experts, names, strict=True):
            yield Unit(rule=rule, layer=layer, expert=expert, names=(name,))


def _missing(weights: WeightMap, units: list[Unit], origin: HfReader) -> list[str]:
    """Return the tensors of the original that neither the checkpoint holds nor Megatron leaves untrained."""
    known = {name for unit in units for name in unit.hf_names}
    known |= {name for rule in weights.rules if rule.load_only for name in rule.hf_names()}
    known |= {copy for copy, original in weights.copies.items() if original in known}
    return [name for name in origin.names() if name not in known and not weights.is_untrained(name)]


def _hf_tensors(unit: Unit, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Bucket:
    rule = unit.rule
    parts = [rule.mapping.to_hf(tensors[name]) for name in unit.names]
    whole = [
        torch.stack(of_one) if rule.stacked else of_one[0] for of_one in zip(*parts, strict=True)
    ]
    kind = torch.float32 if rule.fp32 else dtype
    return [(name, tensor.to(kind)) for name, tensor in zip(unit.hf_names, whole, strict=True)]


# ---- several files at a time


def _write_files(conversion: Conversion, folder: Path, max_workers: int) -> Iterator[WeightFile]:
    """Yield the files in order, written by this process or by up to `max_workers` child processes.

    Worker i writes the files i, i + workers, ...: each holds one file at a time.
    """
    numbers = range(len(conversion.files))
    workers = min(max_workers, len(numbers))
    if workers == 1:
        yield from (conversion.write(number, folder) for number in numbers)
        return
    threads = max(1, (os.cpu_count() or 1) // workers)
    started: list[tuple[SpawnProcess, Connection]] = []
    try:
        for first in range(workers):
            share = list(numbers[first::workers])
            started.append(_start_worker(conversion.plan, folder, share, threads))
        for number in numbers:
            yield _received(*started[number % workers])
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def _start_worker(
    plan: Plan, folder: Path, numbers: list[int], threads: int
) -> tuple[SpawnProcess, Connection]:
    context = get_context("spawn")  # importing Megatron queries CUDA, which forks then cannot use
    receiver, sender = context.Pipe(duplex=False)
    arguments = (plan, folder, numbers, threads, sender)
    process = context.Process(target=_write_in_worker, args=arguments, daemon=True)
    process.start()
    sender.close()  # the worker's copy is the only one: its end is the end of the pipe
    return process, receiver


def _write_in_worker(
    plan: Plan, folder: Path, numbers: list[int], threads: int, sender: Connection
) -> None:
    torch.set_num_threads(threads)
    try:
        with process_group():
            conversion = Conversion(plan, verified=True)  # by the parent process
            for number in numbers:
                sender.send(conversion.write(number, folder))
    except UserError as error:
        sender.send(error)


def _received(process: SpawnProcess, receiver: Connection) -> WeightFile:
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise UserError(
            f"a worker process ended with status {process.exitcode} (-9: out of memory). Each holds a file "
            "and 1 GiB more: lower --max-workers or --chunk-size"
        ) from None
    if isinstance(result, UserError):
        raise result
    return result


def _checkpoint(folder: str) -> Path:
    """Return the folder of a checkpoint: `folder` itself, or the one that a run would load from it."""
    path = Path(folder)
    if (path / "metadata.json").is_file():
        return path
    found = find_checkpoint(folder)
    if found is None:
        raise ConfigError(f"--input-dir: {folder} is not a checkpoint and contains no complete one")
    return found
