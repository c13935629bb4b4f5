"""Write metrics to metrics.jsonl, and to TensorBoard and Weights & Biases if enabled.

The only importer of tensorboard and wandb, each only if its flag is set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

import numpy as np

from slime.config.env import read_env
from slime.core.errors import ConfigError, UserError
from slime.runlog.earlier_runs import METRICS_FILE
from slime.runlog.jsonl import (
    LogErrors,
    LogWrites,
    append_lines,
    keep_lines,
    read_lines,
)
from slime.runlog.sample_log import SAMPLES_FILE
from slime.runlog.sample_table import cut_table
from slime.runlog.token_log import cut_tokens
from slime.utils.machine import requirement_of

if TYPE_CHECKING:
    from slime.config.arguments import Args

__all__ = ["METRICS_FILE", "RESUMES_FILE", "Tracker", "cut_back", "logged_rollouts"]

RESUMES_FILE = "resumes.jsonl"


class Tracker:
    """Writes every metric to all enabled sinks.

    `tracker.log({"train/loss": 0.1}, rollout_id=3, kind="train")` appends to metrics.jsonl::

        {"rollout_id": 3, "kind": "train", "time": 1760000000.0, "train/loss": 0.1}

    A value that is not finite is written as null, so that every line stays valid JSON.
    """

    def __init__(self, args: Args, run_dir: str | Path) -> None:
        run_dir = Path(run_dir)
        next_rollout_id = 1 + max(
            (record["rollout_id"] for record in read_lines(run_dir / METRICS_FILE)), default=-1
        )
        self._sinks: list[_Sink] = [_JsonlSink(run_dir / METRICS_FILE)]
        if args.use_tensorboard:
            self._sinks.append(_TensorBoardSink(args, run_dir, next_rollout_id))
        if args.use_wandb:
            self._sinks.append(_WandbSink(args, run_dir))

    def log(self, metrics: Mapping[str, SupportsFloat], *, rollout_id: int, kind: str) -> None:
        values = {name: _plain_number(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.write(values, rollout_id, kind)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def cut_back(run_dir: str | Path, start_rollout_id: int) -> int:
    """Remove a run's records from `start_rollout_id` on, before it repeats those rollouts.

    Call it before the Tracker is created. Return the number of lines dropped, including a partial
    last line and the samples of an unfinished evaluation, which will be repeated.
    """
    run_dir = Path(run_dir)
    dropped = keep_lines(run_dir / METRICS_FILE, lambda r: r["rollout_id"] < start_rollout_id)
    evaluated = logged_rollouts(run_dir, "eval")

    def is_kept(row: Mapping[str, Any]) -> bool:
        rollout_id = row["rollout_id"]
        if rollout_id == start_rollout_id - 1 and str(row.get("kind", "")).startswith("eval/"):
            return rollout_id in evaluated
        return rollout_id < start_rollout_id

    def are_kept(table: np.ndarray, datasets: list[str]) -> np.ndarray:
        kinds = [datasets[number] for number in table["dataset"]]
        rows = zip(kinds, table["rollout_id"].tolist(), strict=True)
        return np.array([is_kept({"kind": k, "rollout_id": r}) for k, r in rows], bool)

    dropped += keep_lines(run_dir / SAMPLES_FILE, is_kept)
    cut_table(run_dir, are_kept, run_dir / SAMPLES_FILE)
    cut_tokens(run_dir, start_rollout_id)
    if start_rollout_id > 0 or dropped:
        resume = {"time": time.time(), "start_rollout_id": start_rollout_id, "dropped": dropped}
        append_lines(run_dir / RESUMES_FILE, [resume])
    return dropped


def logged_rollouts(run_dir: str | Path, kind: str) -> set[int]:
    """Return the rollouts for which metrics.jsonl holds a line of this kind."""
    records = read_lines(Path(run_dir) / METRICS_FILE)
    return {record["rollout_id"] for record in records if record["kind"] == kind}


class _Sink(Protocol):
    def write(self, values: Mapping[str, float | None], rollout_id: int, kind: str) -> None: ...

    def close(self) -> None: ...


class _JsonlSink:
    """Each line is on disk when `write` returns, except on a full disk: then it waits for room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writes = LogWrites("metrics cannot be written yet: %s")
        self._writes.add(partial(append_lines, path, []))  # live pages find runs by this file

    def write(self, values: Mapping[str, float | None], rollout_id: int, kind: str) -> None:
        record = {"rollout_id": rollout_id, "kind": kind, "time": time.time(), **values}
        self._writes.add(partial(append_lines, self._path, [record]))

    def close(self) -> None:
        self._writes.flush()


class _TensorBoardSink:
    def __init__(self, args: Args, run_dir: Path, next_rollout_id: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing_package("--use-tensorboard", "tensorboard", error) from None
        folder = Path(args.tb_project_name or run_dir / "tensorboard")
        folder = folder / (args.tb_experiment_name or run_dir.name)
        self._writer = SummaryWriter(str(folder), purge_step=next_rollout_id)
        self._errors = LogErrors("TensorBoard's files are not written any more: %s")

    def write(self, values: Mapping[str, float | None], rollout_id: int, kind: str) -> None:
        with self._errors.warned_once():
            for name, value in values.items():
                self._writer.add_scalar(name, math.nan if value is None else value, rollout_id)
            self._writer.flush()

    def close(self) -> None:
        with self._errors.warned_once():
            self._writer.close()


class _WandbSink:
    def __init__(self, args: Args, run_dir: Path) -> None:
        try:
            import wandb
            import wandb.errors
        except ImportError as error:
            raise _missing_package("--use-wandb", "wandb", error) from None
        folder = Path(args.wandb_dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        run_id_file = run_dir / "wandb_run_id.txt"
        kept_id = run_id_file.read_text().strip() if run_id_file.exists() else None
        try:
            self._run = wandb.init(
                mode=args.wandb_mode,  # None: WANDB_MODE, or what `wandb offline` set
                dir=str(folder),
                entity=args.wandb_team,
                project=args.wandb_project or "slime",
                group=args.wandb_group,
                name=run_dir.name,
                id=args.wandb_run_id or kept_id,
                resume="allow",
                config=args.to_dict(redact=True),
                settings=wandb.Settings(**_wandb_settings(args)),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"--use-wandb: W&B did not start: {error}. Check --wandb-key and --wandb-host, or add "
                "--wandb-mode offline and upload later with `wandb sync`."
            ) from None
        run_id_file.write_text(f"{self._run.id}\n")
        # W&B's own step must increase; rollout_id goes back to the checkpoint after a resume.
        self._run.define_metric("*", step_metric="rollout_id")

    def write(self, values: Mapping[str, float | None], rollout_id: int, kind: str) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._run.log({"rollout_id": rollout_id, **known})

    def close(self) -> None:
        self._run.finish()


def _wandb_settings(args: Args) -> dict[str, Any]:
    """Return server and key. The key stays in this process's memory; no file of the run holds it."""
    import wandb

    settings: dict[str, Any] = {"x_disable_meta": True}  # the metadata would hold the command line
    if args.wandb_host:
        settings["base_url"] = args.wandb_host
    key = args.wandb_key or read_env().wandb_api_key
    mode = args.wandb_mode or wandb.setup().settings.mode
    if key and mode not in ("offline", "disabled"):
        settings["api_key"] = key
    return settings


def _missing_package(flag: str, package: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{flag} needs the package {package}, which cannot be imported here ({error}). "
        f"Type `pip install '{requirement_of(package)}'`, or remove the flag."
    )


def _plain_number(value: SupportsFloat) -> float | None:
    """Convert numpy and torch scalars; None for NaN and infinity, which JSON cannot represent."""
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
