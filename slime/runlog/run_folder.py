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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from slime.config.checks.output_paths import portable
from slime.config.checks.preflight import check_writable
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError
from slime.runlog.earlier_runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    RESOLVED_FILE,
    check_earlier_results,
    set_aside,
)
from slime.runlog.jsonl import replace_file
from slime.utils.machine import describe_machine

if TYPE_CHECKING:
    from slime.config.arguments import Args

__all__ = ["CONFIG_FILE", "ENVIRONMENT_FILE", "RESOLVED_FILE", "hold_run_folder", "open_run_folder"]

_HEADER = "# slime run. Repeat it in a folder of its own: slime train --config THIS_FILE --run-dir NEW_FOLDER\n"
# Belong to one start, not to the run.
_NOT_REPEATED = ("config", "run_dir", "dry_run", "wandb_run_id")


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
    if run_dir.is_file():
        raise ConfigError(f"--run-dir {run_dir} is a file; name a folder")
    if check_earlier_results(args, _given(args), loaded):
        set_aside(run_dir)
    check_writable(run_dir, "--run-dir")
    (run_dir / "logs").mkdir(exist_ok=True)
    write_config(args, run_dir)
    _record_start(run_dir)
    return run_dir


def write_config(args: Args, run_dir: Path) -> None:
    values = {name: _plain(value) for name, value in args.to_dict(redact=True).items()}
    origins = {name: args.origin(name) for name in values}
    given = _given(args)
    lines = [_HEADER, *_secret_lines(args, origins)]
    lines.append(yaml.safe_dump(given, sort_keys=True) if given else "{}\n")
    for name in sorted(set(values) - set(given)):
        if values[name] is not None:
            lines.append(f"# {name}: {json.dumps(values[name])}  ({origins[name]})\n")
    replace_file(run_dir / CONFIG_FILE, "".join(lines).encode())
    resolved = {name: {"value": values[name], "origin": origins[name]} for name in sorted(values)}
    replace_file(run_dir / RESOLVED_FILE, yaml.safe_dump(resolved).encode())


def _given(args: Args) -> dict[str, object]:
    """Return what the user set, as stored in config.yaml: without secrets, with portable paths."""
    plain = {name: _plain(value) for name, value in args.to_dict(redact=False).items()}
    left_out = {*_secrets(args), *_NOT_REPEATED}
    given = {
        name: value
        for name, value in plain.items()
        if args.origin(name) in ("command line", "config") and name not in left_out
    }
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
    path = run_dir / ENVIRONMENT_FILE
    starts = json.loads(path.read_text())["starts"] if path.exists() else []
    starts.append({"time": time.time(), **describe_machine()})
    replace_file(path, json.dumps({"starts": starts}, indent=2).encode() + b"\n")


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
