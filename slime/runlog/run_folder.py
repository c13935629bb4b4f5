"""The run folder: write its files, and read them for report and summary.

config.yaml            what was set, loadable with --config; defaults and derived values as comments
config_resolved.yaml   every value with its origin
environment.json       versions, GPUs, commit; one entry per start of the run
metrics.jsonl samples.jsonl logs/ report.html
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.checks.file_checks import check_writable
from slime.config.derive import portable
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError, UserError
from slime.runlog import metric_names
from slime.runlog.earlier_runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RESOLVED_FILE,
    check_earlier_results,
    read_earlier_start,
    set_aside,
)
from slime.runlog.jsonl import read_lines, replace_file
from slime.runlog.own_config import signed
from slime.runlog.run_yaml import dump_run_yaml, read_resolved
from slime.runlog.sample_log import SampleRow, read_samples
from slime.runlog.tracking import METRICS_FILE, RESUMES_FILE
from slime.utils.machine import describe_machine
from slime.utils.untrusted_files import read_regular

if TYPE_CHECKING:
    from slime.config.arguments import Args

_HEADER = "# slime run. To repeat it in a new folder: slime train --config THIS_FILE --run-dir NEW_FOLDER\n"
_REPEATED = ("command line", "config", "own option")  # origins of what the user set
_MAX_BYTES = 16 << 20  # of environment.json
# Belong to one start, not to the run.
_NOT_REPEATED = ("config", "run_dir", "dry_run", "wandb_run_id", "watch")


def hold_run_folder(run_dir: str) -> int:
    """Create and lock the folder; the lock ends when the handle is closed or the process exits."""
    return hold_folder(run_dir, "--run-dir")


def hold_folder(folder: str, flag: str) -> int:
    """Create and lock a folder that only one run at a time may write to."""
    check_writable(folder, flag)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"{flag} {folder}: another run is using it; wait until it ends, or name another folder"
        ) from None
    except OSError:  # a filesystem without locks
        pass
    return handle


def open_run_folder(args: Args, *, loaded: Path | None = None) -> Path:
    """Create or reopen the run's folder, and record configuration and machine in it.

    `loaded` is the checkpoint that the run continues from. Results of earlier attempts are kept.
    """
    run_dir = Path(args.run_dir)
    if check_run_folder(args, loaded=loaded):
        set_aside(run_dir)
    check_writable(run_dir, "--run-dir")
    (run_dir / "logs").mkdir(exist_ok=True)
    write_config(args, run_dir)
    _record_start(run_dir)
    return run_dir


def check_run_folder(args: Args, *, loaded: Path | None = None) -> bool:
    """Refuse a folder that is not a run's, without writing; return whether to set earlier results aside."""
    if Path(args.run_dir).is_file():
        raise ConfigError(f"--run-dir {args.run_dir} is a file; name a folder")
    return check_earlier_results(args, _given(args), loaded)


def resume_line(args: Args, start_rollout_id: int) -> str:
    """Return where a resumed run continues, and what differs from the last start in its folder.

    `continuing after rollout 39: --lr 0.0002 -> 5e-05, --num-rollout 40 -> 50`
    """
    before, now = read_earlier_start(Path(args.run_dir)).given, _given(args)
    names = sorted(before.keys() | now.keys()) if before else []
    changes = [
        f"{option_of(name)} {before.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in names
        if name not in ("load", "ckpt_step") and before.get(name) != now.get(name)
    ]
    return f"continuing after rollout {start_rollout_id - 1}" + (
        f": {', '.join(changes)}" if changes else ""
    )


def write_config(args: Args, run_dir: Path) -> None:
    values = {name: _plain(value) for name, value in args.to_dict(redact=True).items()}
    origins = {name: args.origin(name) for name in values}
    given = _given(args)
    lines = [_HEADER, *_secret_lines(args, origins)]
    lines.append(dump_run_yaml(given) if given else "{}\n")
    for name in sorted(set(values) - set(given)):
        if values[name] is not None:
            lines.append(f"# {name}: {json.dumps(values[name])}  ({origins[name]})\n")
    replace_file(run_dir / CONFIG_FILE, signed("".join(lines)).encode())
    resolved = {name: {"value": values[name], "origin": origins[name]} for name in sorted(values)}
    replace_file(run_dir / RESOLVED_FILE, dump_run_yaml(resolved).encode())


def _given(args: Args) -> dict[str, object]:
    """Return what the user set, as stored in config.yaml: without secrets, with portable paths."""
    plain = {name: _plain(value) for name, value in args.to_dict(redact=False).items()}
    left_out = {*_secrets(args), *_NOT_REPEATED}
    given = {
        name: value
        for name, value in plain.items()
        if args.origin(name) in _REPEATED and name not in left_out
    }
    given |= {name: _plain(value) for name, value in args.role_replaced.items()}
    return portable(given, args.run_dir)


def _secrets(args: Args) -> list[str]:
    """Return the flags whose values are redacted, at least in part."""
    shown = args.to_dict(redact=True)
    return [n for n, v in args.to_dict(redact=False).items() if _plain(v) != _plain(shown[n])]


def _secret_lines(args: Args, origins: Mapping[str, str]) -> list[str]:
    given = [n for n in _secrets(args) if origins[n] in ("command line", "config")]
    if not given:
        return []
    flags = ", ".join(option_of(name) for name in given)
    return [f"# Secrets are not kept: give {flags} again to repeat the run.\n"]


def _record_start(run_dir: Path) -> None:
    starts = [*read_starts(run_dir), {"time": time.time(), **describe_machine()}]
    replace_file(
        run_dir / ENVIRONMENT_FILE, json.dumps({"starts": starts}, indent=2).encode() + b"\n"
    )


def _plain(value: object) -> object:
    """Convert a value to types of YAML and JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: _plain(getattr(value, name)) for name in fields}
    return str(value)


Point = tuple[int, float]  # (rollout_id, value)


@dataclass(kw_only=True, frozen=True)
class RunData:
    """What a run has recorded so far. Series hold (rollout_id, value) in logging order."""

    run_dir: Path
    series: dict[str, list[Point]]
    phases: list[tuple[int, dict[str, float]]]  # seconds per phase of each rollout
    rollout_seconds: list[float]  # of each rollout, including the time between phases
    samples: list[tuple[int, SampleRow]]
    config: dict[str, Any]
    origins: dict[str, str]
    starts: list[dict[str, Any]]
    resumed_at: list[int]

    def eval_datasets(self) -> list[str]:
        return list(metric_names.eval_rewards(self.series))

    def eval_reward(self, dataset: str) -> list[Point]:
        return self.series[f"eval/{dataset}/reward"]

    def rollouts(self) -> int:
        """Return the number of rollouts that were trained on."""
        return len({rollout_id for rollout_id, _ in self.phases})

    def seconds(self) -> float:
        """Return the running time, including starts, without pauses between a crash and a resume."""
        return sum(seconds for _, seconds in self.series.get(metric_names.STEP_TIME, []))

    def total(self, name: str) -> float:
        return sum(value for _, value in self.series.get(name, []))


def read_run(run_dir: str | Path) -> RunData:
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not a folder. Name the folder of a run, such as runs/quickstart."
        )
    records = [r for r in read_lines(run_dir / METRICS_FILE) if metric_names.is_record(r)]
    rollouts = [record for record in records if record["kind"] == "perf"]
    path = run_dir / RESOLVED_FILE
    resolved = read_resolved(path) if path.exists() else {}
    return RunData(
        run_dir=run_dir,
        series=_series(records),
        phases=[(r["rollout_id"], metric_names.phase_times(_numbers(r))) for r in rollouts],
        rollout_seconds=[s for r in rollouts if (s := _numbers(r).get(metric_names.STEP_TIME))],
        samples=read_samples(run_dir),
        config={name: entry["value"] for name, entry in resolved.items()},
        origins={name: str(entry.get("origin")) for name, entry in resolved.items()},
        starts=read_starts(run_dir),
        resumed_at=[
            start
            for record in read_lines(run_dir / RESUMES_FILE)
            if isinstance(start := record.get("start_rollout_id"), int)
        ],
    )


def _series(records: list[dict[str, Any]]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for record in records:
        for name, value in _numbers(record).items():
            series.setdefault(name, []).append((record["rollout_id"], value))
    return series


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a record without null, which stands for NaN and infinity."""
    return {
        name: value
        for name, value in record.items()
        if name not in metric_names.RECORD_KEYS and isinstance(value, int | float)
    }


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the machine of each start, an empty list if they cannot be read."""
    try:
        starts = json.loads(read_regular(run_dir / ENVIRONMENT_FILE, _MAX_BYTES))["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [start for start in starts if _is_start(start)] if isinstance(starts, list) else []


def _is_start(start: object) -> bool:
    """Return whether this has the types that a run writes: the folder may come from elsewhere."""
    if not isinstance(start, dict) or type(start.get("time")) not in (int, float):
        return False
    gpus = start.get("gpus") or []
    named = isinstance(gpus, list) and all(isinstance(g, dict) and "name" in g for g in gpus)
    return named and abs(start["time"]) < 2**40
