"""Folders of checkpoints: written aside, renamed when complete, so that a reader never sees half a save.

<save>/iter_0000019/                       complete
<save>/iter_0000039.tmp/                   being written; ignored, and removed by the next save
<save>/latest_checkpointed_iteration.txt   "19"
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slime.utils.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
_META = "meta.json"
_NAME = re.compile(r"^iter_(\d{7,})$")


@dataclass(kw_only=True, frozen=True)
class CheckpointMeta:
    """What a run needs to know of a checkpoint before it loads it."""

    rollout_id: int  # the last rollout trained on
    weight_version: int  # the version the engines had before this rollout's update
    train_backend: str
    release: bool = False  # weights that no run has trained: a run that loads them starts at 0
    # of its files when it was written
    sizes: dict[str, int] = field(default_factory=dict, compare=False)


class CheckpointFolder:
    """The folder `--save` names."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def path(self, rollout_id: int) -> Path:
        return self.root / f"iter_{rollout_id:07d}"

    def begin(self, rollout_id: int) -> Path:
        """An empty folder to write the checkpoint into; `commit` makes it count."""
        for leftover in self.root.glob("iter_*.tmp"):
            shutil.rmtree(leftover)
        aside = self._aside(rollout_id)
        aside.mkdir(parents=True)
        return aside

    def commit(self, meta: CheckpointMeta, keep: int | None = None) -> Path:
        """Make a completely written checkpoint the latest one, then drop all but the newest `keep`."""
        aside, final = self._aside(meta.rollout_id), self.path(meta.rollout_id)
        complete = replace(meta, sizes=_sizes(aside))
        (aside / _META).write_text(json.dumps(asdict(complete)) + "\n")
        _sync_tree(aside)
        if final.exists():  # the same rollout saved again after a resume
            shutil.rmtree(final)
        aside.rename(final)
        self._point_to(meta.rollout_id)
        self.prune(keep)
        return final

    def prune(self, keep: int | None) -> None:
        """Drop all but the newest `keep`, and never the only one."""
        for rollout_id in self.rollout_ids()[: -max(keep, 1)] if keep is not None else ():
            shutil.rmtree(self.path(rollout_id))

    def discard(self, rollout_id: int) -> None:
        shutil.rmtree(self._aside(rollout_id), ignore_errors=True)

    def rollout_ids(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.match(entry.name) for entry in self.root.iterdir())
        return sorted(int(m[1]) for m in matches if m and (self.path(int(m[1])) / _META).exists())

    def _aside(self, rollout_id: int) -> Path:
        return self.root / f"iter_{rollout_id:07d}.tmp"

    def _point_to(self, rollout_id: int) -> None:
        fresh = self.root / f"{TRACKER}.tmp"
        fresh.write_text(f"{rollout_id}\n")
        _sync_file(fresh)
        fresh.replace(self.root / TRACKER)
        _sync_file(self.root)


def find_checkpoint(load: str | None, step: int | None = None) -> Path | None:
    """The checkpoint `--load` (and `--ckpt-step`) means; None where the folder holds none yet."""
    if load is None:
        return None
    folder = CheckpointFolder(load)
    complete = folder.rollout_ids()
    if step is None:
        # After a crash between rename and tracker the newest complete folder is the truth.
        return folder.path(complete[-1]) if complete else None
    if step not in complete:
        raise ConfigError(
            f"--ckpt-step {step}: {load} has no complete checkpoint of that step; "
            f"it has {complete or 'none'}"
        )
    return folder.path(step)


def read_meta(path: Path) -> CheckpointMeta:
    """What the checkpoint says of itself; ConfigError where a part of it was lost since."""
    try:
        meta = CheckpointMeta(**json.loads((path / _META).read_text()))
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"{_META} cannot be read ({error})") from None
    for name, size in meta.sizes.items():
        file = path / name
        if not file.exists():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size < size:
            raise _damaged(path, f"{name} has {file.stat().st_size} of its {size} bytes")
    return meta


def _damaged(path: Path, what: str) -> ConfigError:
    number = _NAME.match(path.name)
    others = CheckpointFolder(path.parent).rollout_ids()
    earlier = [str(n) for n in others if number and n != int(number[1])]
    advice = (
        f"use another one: --ckpt-step {' or '.join(earlier)}" if earlier else "there is no other"
    )
    return ConfigError(f"the checkpoint {path} is damaged: {what}; {advice}")


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def how_to_continue(save: str | None, load: str | None) -> str:
    """What to type after a run with these flags broke off."""
    if save is None:
        return "Nothing was saved (--save was not given): the same command starts anew."
    good = CheckpointFolder(save).rollout_ids()
    if not good:
        return "Nothing had been saved yet: the same command starts anew."
    where = f"The checkpoint after rollout {good[-1]} is in {save}"
    if load == save:
        return f"{where}: the same command continues from it."
    return f"{where}: continue with the same command and --load {save}"


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_file(Path(folder) / name)
        _sync_file(Path(folder))


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
