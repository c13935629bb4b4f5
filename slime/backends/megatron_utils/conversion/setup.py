"""What a conversion sets up: flags, sharding of the model, process group, progress display.

Flags are MODEL_ARGS, --hf-checkpoint and --save. Without parallel sizes among them the ranks form
one pipeline with stages of about equal size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from slime.backends.megatron_utils.hf_weights.reader import HfReader
from slime.backends.megatron_utils.hf_weights.rules import WeightMap
from slime.config.arguments import Args
from slime.config.checks.megatron_support import check_megatron_flags
from slime.config.flags.draft import Draft, Origin
from slime.config.flags.parser import read_command_line
from slime.config.flags.registry import all_flags
from slime.core.errors import ConfigError
from slime.utils.device import collective_backend, device_type

_CONVERSION_FLAGS = ("hf_checkpoint", "save", "bf16", "fp32", "seed", "distributed_timeout_minutes")
_LAYOUT_FLAGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def conversion_args(argv: list[str]) -> Args:
    """Parse the flags; raise ConfigError for one that has no effect or a missing folder."""
    given = read_command_line(argv)
    flags = all_flags()
    for name in given:
        if name not in _CONVERSION_FLAGS and flags[name].family != "megatron":
            raise ConfigError(
                f"{flags[name].option} has no effect in a conversion: give MODEL_ARGS, "
                "--hf-checkpoint and --save"
            )
    _check_folders(given)
    origins: dict[str, Origin] = dict.fromkeys(given, "command line")
    draft = Draft({"train_backend": "megatron", **given}, origins, gpus=0)
    check_megatron_flags(draft)
    draft.derive_if_unset("context_parallel_size", 1)
    draft.derive("precision", "fp32")  # until the checkpoint's dtype is known
    return Args(draft.values, draft.origins)


def has_layout(args: Args) -> bool:
    """Return whether the user gave parallel sizes or a pipeline layout."""
    return any(args.origin(name) != "default" for name in _LAYOUT_FLAGS)


def with_layout(args: Args, dtype: str, layout: str | None, world_size: int) -> Args:
    """Set the user's parallel sizes, or a pipeline over the ranks with `layout` (`Ett|ttL`)."""
    num_stages = layout.count("|") + 1 if layout else 1
    values: dict[str, Any] = {
        "tensor_model_parallel_size": args.tensor_model_parallel_size or 1,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size or num_stages,
        "expert_model_parallel_size": args.expert_model_parallel_size or 1,
        "precision": "bf16" if args.bf16 else "fp32" if args.fp32 else dtype,
    }
    tensor = values["tensor_model_parallel_size"]
    values["expert_tensor_parallel_size"] = args.expert_tensor_parallel_size or tensor
    if layout and num_stages > 1:
        values["pipeline_model_parallel_layout"] = layout
    model_ranks = tensor * values["pipeline_model_parallel_size"]
    if world_size % model_ranks:
        raise ConfigError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size "
            f"{values['pipeline_model_parallel_size']} = {model_ranks} does not divide the {world_size} "
            "processes: remove them for a pipeline over all processes"
        )
    return args.replace(**values)


@dataclass(frozen=True)
class ModelSizes:
    """Number of elements before the layers, in each layer, and after the layers."""

    before: int
    layers: tuple[int, ...]
    after: int


def model_sizes(weights: WeightMap, reader: HfReader) -> ModelSizes:
    sizes = {name: prod(reader.shape(name)) for name in reader.names()}
    layers = [0] * weights.num_layers
    for name, size in sizes.items():
        layer = _layer_of(name)
        if layer is not None and layer < weights.num_layers:
            layers[layer] += size
    ends = [rule for rule in weights.rules if not rule.per_layer]  # the embedding first
    before, after = (
        sum(sizes.get(name, 0) for rule in rules for name in rule.hf_names())
        for rules in (ends[:1], ends[1:])
    )
    return ModelSizes(before, tuple(layers), after)


def stages(sizes: ModelSizes, world_size: int) -> list[int]:
    """Return the number of layers per pipeline stage that makes the largest stage smallest.

    There are as many stages as ranks, or the most that divide them, with at least one layer each.

    >>> stages(ModelSizes(before=10, layers=(10, 10, 10, 10), after=10), 3)
    [1, 2, 1]
    """
    most = len(sizes.layers)
    count = max(n for n in range(1, world_size + 1) if world_size % n == 0 and n <= most)
    costs = list(sizes.layers)
    costs[0] += sizes.before
    costs[-1] += sizes.after
    return _partition(costs, count)


def layout_text(layers_of_stages: list[int]) -> str:
    """Return the value of --pipeline-model-parallel-layout: `Ett|ttt|tL`."""
    return "E" + "|".join("t" * count for count in layers_of_stages) + "L"


def _check_folders(given: dict[str, Any]) -> None:
    for name in ("hf_checkpoint", "save"):
        if not given.get(name):
            raise ConfigError(f"{all_flags()[name].option} is missing")
    config = Path(given["hf_checkpoint"]) / "config.json"
    if not config.is_file():
        raise ConfigError(f"--hf-checkpoint: {config} does not exist")


def _partition(costs: list[int], count: int) -> list[int]:
    """Split `costs` into `count` runs whose largest sum is minimal, by dynamic programming."""
    total = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n] = (largest sum, lengths) of the first n items, split into the runs so far
    best: list[tuple[float, list[int]]] = [(sums[n], [n]) for n in range(total + 1)]
    for run in range(2, count + 1):
        best = [
            min(
                (
                    (max(best[m][0], sums[n] - sums[m]), [*best[m][1], n - m])
                    for m in range(run - 1, n)
                ),
                default=(float("inf"), []),
            )
            for n in range(total + 1)
        ]
    return best[total][1]


def _layer_of(name: str) -> int | None:
    parts = name.removeprefix("model.").removeprefix("language_model.").split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 else None


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that torchrun started, or form a group of this process alone."""
    if dist.is_torchelastic_launched():
        dist.init_process_group(collective_backend())
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public, not in __all__
        dist.init_process_group(collective_backend(), store=store, rank=0, world_size=1)
    if device_type() == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def progress(title: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts bytes: a bar on a terminal, a line per 10 % elsewhere, if `shown`."""
    is_terminal = sys.stdout.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=not (shown and is_terminal)) as bar:
        task = bar.add_task(title, total=total)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            tenths = done * 10 // total
            done += nbytes
            bar.update(task, completed=done)
            if shown and not is_terminal and done * 10 // total > tenths:
                print(f"{title}: {done / total:.0%} of {decimal(total)}", flush=True)

        yield advance
