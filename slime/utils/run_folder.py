"""The folder a run leaves behind.

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
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from slime.utils.errors import ConfigError
from slime.utils.jsonl import replace_file
from slime.utils.machine import describe_machine
from slime.utils.preflight import check_writable
from slime.utils.tracking import METRICS_FILE

if TYPE_CHECKING:
    from slime.utils.arguments import Args

CONFIG_FILE = "config.yaml"
RESOLVED_FILE = "config_resolved.yaml"
ENVIRONMENT_FILE = "environment.json"
_HEADER = "# slime run. Repeat it with: slime train --config THIS_FILE --run-dir NEW_FOLDER\n"


_NOT_REPEATED = ("config", "run_dir", "dry_run")  # belong to one start, not to the run


def hold_run_folder(run_dir: str) -> int:
    """Make the folder and keep other runs out of it; released when the handle is closed, or the process ends."""
    check_writable(run_dir, "--run-dir")
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"--run-dir {run_dir}: another run is under way in it; wait for its end, or name another folder"
        ) from None
    except OSError:  # a filesystem without locks
        pass
    return handle


def open_run_folder(args: Args) -> Path:
    """Make the run's folder, or enter it again to resume, and record configuration and machine in it."""
    run_dir = Path(args.run_dir)
    _refuse_strangers(run_dir, resuming=args.load is not None)
    check_writable(run_dir, "--run-dir")
    (run_dir / "logs").mkdir(exist_ok=True)
    write_config(args, run_dir)
    _record_start(run_dir)
    return run_dir


def write_config(args: Args, run_dir: Path) -> None:
    values = {name: _plain(value) for name, value in args.to_dict(redact=True).items()}
    origins = {name: args.origin(name) for name in values}
    secret = {
        name for name, value in args.to_dict(redact=False).items() if _plain(value) != values[name]
    }
    given = {
        name: value
        for name, value in values.items()
        if origins[name] in ("command line", "config") and name not in {*secret, *_NOT_REPEATED}
    }
    lines = [_HEADER, yaml.safe_dump(given, sort_keys=True) if given else "{}\n"]
    for name in sorted(set(values) - set(given)):
        if values[name] is not None:
            lines.append(f"# {name}: {json.dumps(values[name])}  ({origins[name]})\n")
    replace_file(run_dir / CONFIG_FILE, "".join(lines).encode())
    resolved = {name: {"value": values[name], "origin": origins[name]} for name in sorted(values)}
    replace_file(run_dir / RESOLVED_FILE, yaml.safe_dump(resolved).encode())


def _refuse_strangers(run_dir: Path, *, resuming: bool) -> None:
    """A folder is usable when it is new, empty, or a run that is being resumed."""
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return
    if not (run_dir / CONFIG_FILE).exists() or not (run_dir / ENVIRONMENT_FILE).exists():
        raise ConfigError(
            f"--run-dir {run_dir} is not empty and is not the folder of a slime run: "
            "nothing was written. Name a new or an empty folder."
        )
    metrics = run_dir / METRICS_FILE
    if not resuming and metrics.exists() and metrics.stat().st_size > 0:
        raise ConfigError(
            f"--run-dir {run_dir} holds a run with metrics. To continue it, add --load with the folder "
            "its checkpoints are in; to start another run, name another --run-dir."
        )


def _record_start(run_dir: Path) -> None:
    path = run_dir / ENVIRONMENT_FILE
    starts = json.loads(path.read_text())["starts"] if path.exists() else []
    starts.append({"time": time.time(), **describe_machine()})
    replace_file(path, json.dumps({"starts": starts}, indent=2).encode() + b"\n")


def _plain(value: object) -> object:
    """The value as YAML and JSON can hold it."""
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
