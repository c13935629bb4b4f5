"""Decide whether a run may write into folders that hold results of earlier runs.

--run-dir      new, an attempt that completed no rollout, a run that is resumed from its own checkpoint,
               or the same command again after an attempt that saved nothing (set aside, see below)
--save         without checkpoints, or the same folder as --load
other outputs  without content, inside --run-dir, or named by the earlier start of this run
Everything else is refused before anything is written.
"""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError, UserError
from slime.runlog.jsonl import read_lines, replace_file
from slime.runlog.run_yaml import read_run_yaml

if TYPE_CHECKING:
    from slime.config.arguments import Args

CONFIG_FILE = "config.yaml"
RESOLVED_FILE = "config_resolved.yaml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
OWNER_FILE = "slime_run.json"  # in the folder of --save
INPUTS = "inputs"  # what slime.train was given, written before the start
_LOGS = "logs"
_ATTEMPT = "attempt_"
_STARTED = {CONFIG_FILE, RESOLVED_FILE, ENVIRONMENT_FILE, INPUTS, _LOGS}
_CHECKPOINTS = re.compile(r"^(iter_\d+|release|latest_checkpointed_iteration\.txt)$")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True, kw_only=True)
class EarlierStart:
    """Results of the last start in a run folder: `{"lr": 1e-6}`, all resolved values, rollouts 0-7."""

    given: dict[str, Any]
    values: dict[str, Any]
    rollouts: set[int]  # that were generated or trained on, by metrics.jsonl

    @property
    def complete(self) -> bool:
        wanted = self.values.get("num_rollout")
        return bool(self.rollouts) and (wanted is None or max(self.rollouts) + 1 >= wanted)


def check_earlier_results(args: Args, given: dict[str, Any], loaded: Path | None) -> bool:
    """Refuse to overwrite another run's results; return whether to set the earlier attempt aside.

    `given` is what config.yaml will hold, `loaded` the checkpoint the run continues from.
    """
    run_dir = Path(args.run_dir)
    _refuse_foreign_folder(run_dir)
    earlier = read_earlier_start(run_dir)
    if loaded is not None:
        _check_resumed(run_dir, earlier, loaded)
    elif earlier.rollouts:
        _check_repeated(run_dir, earlier, given)
    if not args.debug_rollout_only:
        _check_checkpoints("--save", args.save, args.load)
        resumed = args.save and _same(args.load, args.save)
        _check_checkpoints(
            "--critic-save", args.critic_save, args.critic_save if resumed else args.critic_load
        )
    _check_other_outputs(args, earlier)
    return loaded is None and (bool(earlier.rollouts) or earlier.given != given)


def set_aside(run_dir: Path) -> None:
    """Move the results of an attempt, except inputs and logs, to attempt_1, attempt_2, ... in the run folder."""
    found = run_dir.iterdir() if run_dir.is_dir() else ()
    kept = (INPUTS, _LOGS)
    entries = [e for e in found if e.name not in kept and not e.name.startswith(_ATTEMPT)]
    if not any(entry.name == METRICS_FILE for entry in entries):
        return
    number = 1 + sum(1 for _ in run_dir.glob(f"{_ATTEMPT}*"))
    folder = run_dir / f"{_ATTEMPT}{number}"
    folder.mkdir()
    for entry in entries:
        entry.rename(folder / entry.name)


def name_owner(args: Args) -> None:
    """Record in the folder of --save which run owns it, for starts with another --run-dir."""
    if args.save and not args.debug_rollout_only:
        record = {"run_dir": args.run_dir, "outputs": {k: v for k, v in _others(args).items() if v}}
        replace_file(Path(args.save) / OWNER_FILE, json.dumps(record, indent=2).encode() + b"\n")


def read_earlier_start(run_dir: Path) -> EarlierStart:
    """Read the records of the last start; raise ConfigError for files that slime did not write."""
    try:
        given, resolved = (
            read_run_yaml(path) if path.exists() else {}
            for path in (run_dir / CONFIG_FILE, run_dir / RESOLVED_FILE)
        )
        return EarlierStart(
            given=dict(given),
            values={name: entry["value"] for name, entry in resolved.items()},
            rollouts={
                int(record["rollout_id"])
                for record in read_lines(run_dir / METRICS_FILE)
                if record.get("kind") in ("rollout", "train")
            },
        )
    except (UserError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--run-dir {run_dir}: its records are damaged or not slime's ({reason}): nothing was "
            "written. Name another --run-dir."
        ) from None


def _refuse_foreign_folder(run_dir: Path) -> None:
    names = {entry.name for entry in run_dir.iterdir()} if run_dir.is_dir() else set()
    # A start that was killed immediately leaves some of the first files, or temporary ones.
    begun = {name for name in names if name in _STARTED or re.fullmatch(r"\..*\.tmp", name)}
    if names > begun and not {CONFIG_FILE, ENVIRONMENT_FILE} <= names:
        raise ConfigError(
            f"--run-dir {run_dir} is not empty and is not the folder of a slime run: "
            "nothing was written. Name a new or an empty folder."
        )


def _check_resumed(run_dir: Path, earlier: EarlierStart, loaded: Path) -> None:
    """Check that the checkpoint belongs to this run, whose metrics are cut back to it."""
    folder = loaded.parent
    known = [earlier.values.get(name) for name in ("save", "load")]
    owner = _read_owner(folder).get("run_dir")
    if not earlier.rollouts or _inside(folder, run_dir) or _same(owner, run_dir):
        return
    if not any(_same(path, folder) for path in known):
        raise ConfigError(
            f"--run-dir {run_dir} holds the metrics of a run that did not save to --load {folder}: "
            "nothing was written. Name the folder with that run's checkpoints, or another --run-dir."
        )


def _check_repeated(run_dir: Path, earlier: EarlierStart, given: dict[str, Any]) -> None:
    """Allow a fresh start in a folder with metrics only for the same command, if nothing was saved."""
    saved = earlier.values.get("save")
    holds = f"--run-dir {run_dir} holds the metrics of a run of {_count(earlier.rollouts)}"
    if _has_checkpoints(saved):
        raise ConfigError(
            f"{holds}: nothing was written. To continue it, add --load {saved}; "
            "to start another run, name another --run-dir."
        )
    if earlier.complete or earlier.given != given:
        raise ConfigError(
            f"{holds}, and there is no checkpoint to --load: nothing was written. Name another --run-dir."
        )


def _check_checkpoints(flag: str, folder: str | None, load: str | None) -> None:
    if not folder or _same(load, folder) or not _has_checkpoints(folder):
        return
    owner = _read_owner(Path(folder)).get("run_dir")
    whose = f"checkpoints of the run in {owner}" if owner else "checkpoints of another run"
    load_flag = flag.replace("save", "load")
    raise ConfigError(
        f"{flag} {folder} holds {whose}: nothing was written. Add {load_flag} {folder} to continue that "
        f"run, or name another folder for {flag}."
    )


def _check_other_outputs(args: Args, earlier: EarlierStart) -> None:
    load = args.load or ""
    claims = _read_owner(Path(load)).get("outputs", {}) if _same(load, args.save) else {}
    for name, path in _others(args).items():
        own = [earlier.values.get(name), claims.get(name)]
        if not path or _inside(path, args.run_dir) or any(_same(path, mine) for mine in own):
            continue
        found = _existing(path)
        if found:
            flag = option_of(name)
            raise ConfigError(
                f"{flag} {path}: {found} is another run's: nothing was written. Name another path for "
                f"{flag}, or move that one away."
            )


def _others(args: Args) -> dict[str, str | None]:
    """Return outputs other than checkpoints by flag; they may contain {rollout_id} etc."""
    board = args.tb_project_name if args.use_tensorboard else None
    return {
        "save_hf": None if args.debug_rollout_only else args.save_hf,
        "save_debug_rollout_data": args.save_debug_rollout_data,
        "save_debug_train_data": args.save_debug_train_data,
        "tb_project_name": board
        and str(Path(board) / (args.tb_experiment_name or Path(args.run_dir).name)),
    }


def _existing(path: str) -> str | None:
    """Return the first existing non-empty file or folder that matches the path or pattern."""
    parts = _PLACEHOLDER.split(path)
    for found in sorted(glob.glob("*".join(map(glob.escape, parts)))):
        if not os.path.isdir(found) or os.listdir(found):
            return found
    return None


def _has_checkpoints(folder: str | None) -> bool:
    if not folder or not Path(folder).is_dir():
        return False
    return any(_CHECKPOINTS.match(entry.name) for entry in Path(folder).iterdir())


def _read_owner(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / OWNER_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _same(a: str | Path | None, b: str | Path | None) -> bool:
    return bool(a) and bool(b) and os.path.realpath(str(a)) == os.path.realpath(str(b))


def _inside(path: str | Path, folder: str | Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _count(rollouts: set[int]) -> str:
    return f"{len(rollouts)} rollout{'' if len(rollouts) == 1 else 's'}"
