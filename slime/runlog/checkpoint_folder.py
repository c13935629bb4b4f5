"""Folders of checkpoints: written to a temporary folder and renamed when complete.

<save>/iter_0000019/                       complete
<save>/iter_0000039.tmp/                   being written; ignored, and removed by the next save
<save>/iter_0000009.deleting/              being removed; likewise
<save>/iter_0000039/abandoned             of a branch that a rewind (--ckpt-step) left behind: not the newest
<save>/latest_checkpointed_iteration.txt   "19"

Megatron's own tools write the same layout without our `meta.json`, and converted weights as `release`.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slime.core.errors import ConfigError
from slime.runlog.checkpoint_files import (
    file_sizes,
    share_of_rank,
    smallest_first,
    sync_file,
    sync_tree,
    take_checksums,
    wrong_checksum,
    wrong_size,
)

TRACKER = "latest_checkpointed_iteration.txt"
CRITIC = "critic"  # the critic's folder inside a checkpoint
_META = "meta.json"
_ABANDONED = "abandoned"  # empty file in a checkpoint: it is loaded only if --ckpt-step names it
_RELEASE = "release"  # weights that Megatron's tools converted
_OWN_FILES = ("trainer.json", "fsdp")  # of slime's trainers
_NAME = re.compile(r"^iter_(\d{7,})$")
_META_SUM = "checksum"  # of meta.json itself
_QUICK_BYTES = 4 << 30  # read of a checkpoint before a run starts: takes seconds


@dataclass(kw_only=True, frozen=True)
class CheckpointMeta:
    """What a run must know about a checkpoint before loading it."""

    rollout_id: int  # the last rollout trained on
    weight_version: int  # the version the engines had before this rollout's update
    train_backend: str
    release: bool = False  # weights that no run has trained: a run that loads them starts at 0
    # Of the files as written; checkpoints of older versions have no checksums.
    sizes: dict[str, int] = field(default_factory=dict, compare=False)
    checksums: dict[str, str] = field(default_factory=dict, compare=False)


class CheckpointFolder:
    """The folder of `--save`."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def path(self, rollout_id: int) -> Path:
        return self.root / f"iter_{rollout_id:07d}"

    def begin(self, rollout_id: int, clean: bool = True) -> Path:
        """Return an empty folder to write the checkpoint into; `commit` makes it valid.

        Remove unfinished checkpoints, with `clean` those of other rollouts too: no other process may be saving.
        """
        partial = self.temporary(rollout_id)
        for pattern in ("iter_*.tmp", "iter_*.deleting") if clean else (partial.name,):
            for leftover in self.root.glob(pattern):
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        return partial

    def commit(
        self, meta: CheckpointMeta, keep: int | None = None, after: int | None = None
    ) -> Path:
        """Make a completely written checkpoint the latest one, then remove all but the newest `keep`.

        `after` is the rollout whose state the run continued from, or its previous checkpoint. Later
        checkpoints are of a branch that a rewind left behind. They are marked as abandoned before the
        rename: a crash in between makes `after` the newest, never one of them.
        """
        partial, final = self.temporary(meta.rollout_id), self.path(meta.rollout_id)
        checksums = take_checksums(partial)
        fields = asdict(replace(meta, sizes=file_sizes(partial), checksums=checksums))
        (partial / _META).write_text(json.dumps(fields | {_META_SUM: _checksum(fields)}) + "\n")
        sync_tree(partial)
        if not meta.release:
            self._abandon(meta.rollout_id - 1 if after is None else after)
        # The same rollout, saved before a resume.
        replaced = self._rename_for_removal(meta.rollout_id)
        partial.rename(final)
        self._point_to(meta.rollout_id)
        if replaced:
            shutil.rmtree(replaced)
        self.prune(keep)
        return final

    def prune(self, keep: int | None) -> None:
        """Remove those older than the newest `keep`, which abandoned ones do not count to."""
        kept = self.rollout_ids()[-max(keep, 1) :] if keep is not None else []
        for rollout_id in self.complete() if kept else ():
            if rollout_id < kept[0] and (removed := self._rename_for_removal(rollout_id)):
                shutil.rmtree(removed)

    def discard(self, rollout_id: int) -> None:
        shutil.rmtree(self.temporary(rollout_id), ignore_errors=True)

    def rollout_ids(self) -> list[int]:
        """Return the complete checkpoints that are not abandoned, or all if every one is, oldest first."""
        complete = self.complete()
        return [n for n in complete if not (self.path(n) / _ABANDONED).exists()] or complete

    def complete(self) -> list[int]:
        """Return the complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.match(entry.name) for entry in self.root.iterdir())
        return sorted(int(m[1]) for m in matches if m and (self.path(int(m[1])) / _META).exists())

    def _abandon(self, after: int) -> None:
        """Mark the checkpoints after that rollout, oldest first: until the last mark, nothing has changed."""
        (self.path(after) / _ABANDONED).unlink(missing_ok=True)
        for rollout_id in self.complete():
            if rollout_id > after:
                (self.path(rollout_id) / _ABANDONED).touch()
                sync_file(self.path(rollout_id))

    def _rename_for_removal(self, rollout_id: int) -> Path | None:
        """Rename a checkpoint before its removal, so that a kill leaves no partial checkpoint."""
        path, renamed = self.path(rollout_id), self.root / f"iter_{rollout_id:07d}.deleting"
        if not path.exists():
            return None
        shutil.rmtree(renamed, ignore_errors=True)
        path.rename(renamed)
        return renamed

    def temporary(self, rollout_id: int) -> Path:
        """Return the folder that a checkpoint is written into before `commit`."""
        return self.root / f"iter_{rollout_id:07d}.tmp"

    def _point_to(self, rollout_id: int) -> None:
        temporary = self.root / f"{TRACKER}.tmp"
        temporary.write_text(f"{rollout_id}\n")
        sync_file(temporary)
        temporary.replace(self.root / TRACKER)
        sync_file(self.root)


def of_step(folder: str, step: int | None, option: str) -> str:
    """Return the checkpoint of `step` in the folder; without a step the folder itself."""
    return folder if step is None else str(find_checkpoint(folder, step, option=option))


def find_checkpoint(
    load: str | None, step: int | None = None, *, option: str = "--ckpt-step"
) -> Path | None:
    """Return the checkpoint of `--load` (and `--ckpt-step`); None if the folder holds none yet."""
    if load is None:
        return None
    folder = CheckpointFolder(load)
    current = folder.rollout_ids()
    foreign = _of_another_tool(folder, current, step)
    if foreign is not None:
        return foreign
    if step is None:
        # After a crash between rename and tracker, the newest complete folder counts.
        return folder.path(current[-1]) if current else None
    complete = folder.complete()
    if step not in complete:
        raise ConfigError(
            f"{option} {step}: {load} has no complete checkpoint of that step; "
            f"it has {complete or 'none'}"
        )
    return folder.path(step)


def _of_another_tool(
    folder: CheckpointFolder, complete: list[int], step: int | None
) -> Path | None:
    """Return the checkpoint without `meta.json` that the tracker, or `step`, names.

    slime renames complete folders to their final names, so such a folder was written by another tool, or is damaged.
    """
    tracker = folder.root / TRACKER
    named = str(step)
    if step is None and tracker.exists():
        with tracker.open(errors="replace") as file:
            named = file.read(32).strip()  # int() raises on thousands of digits
    path = folder.path(int(named)) if named.isdecimal() else folder.root / _RELEASE
    older = named == _RELEASE or (named.isdecimal() and int(named) < max(complete, default=0))
    if step is None and complete and older:
        return None
    if is_foreign(path) and (named.isdecimal() or named == _RELEASE):
        if any((path / name).exists() for name in _OWN_FILES):
            raise damaged(path, f"{_META} is missing")
        return path
    found = (f for f in folder.root.glob("*") if _NAME.match(f.name) or f.name == _RELEASE)
    others = [f.name for f in found if is_foreign(f)]
    if step is None and not complete and (tracker.exists() or others):
        raise ConfigError(
            f"{folder.root} holds {', '.join(others) or 'no checkpoint'}, but {TRACKER} must hold the "
            f"number of a checkpoint there, or {_RELEASE}: correct it"
        )
    return None


def is_foreign(path: Path) -> bool:
    """Return whether a checkpoint was written by another tool than slime."""
    return path.is_dir() and any(path.iterdir()) and not (path / _META).exists()


def read_meta(path: Path) -> CheckpointMeta:
    """Return the checkpoint's metadata; raise ConfigError if any part is missing or damaged."""
    if is_foreign(path):
        release = path.name == _RELEASE
        number = int(match[1]) if (match := _NAME.match(path.name)) else 0
        return CheckpointMeta(
            rollout_id=number, weight_version=0, train_backend="megatron", release=release
        )
    try:
        fields = json.loads((path / _META).read_text())
        expected = fields.pop(_META_SUM, None)
        meta = CheckpointMeta(**fields)
        _check_facts(meta)
    except (ValueError, TypeError, AttributeError) as error:
        raise damaged(path, f"{_META} cannot be read ({error})") from None
    if expected is not None and _checksum(fields) != expected:
        raise damaged(path, f"{_META} is not what was written")
    if problem := wrong_size(path, meta.sizes):
        raise damaged(path, problem)
    return meta


def _check_facts(meta: CheckpointMeta) -> None:
    """Raise ValueError or TypeError for values that only a hostile or damaged file contains."""
    if type(meta.rollout_id) is not int or type(meta.weight_version) is not int:
        raise ValueError("rollout_id and weight_version must be numbers")
    for name in {**meta.sizes, **meta.checksums}:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names the file {name}")


def check_quickly(path: Path, meta: CheckpointMeta) -> None:
    """Raise ConfigError if files are damaged, checking as many small ones as can be read in seconds.

    The ranks check all files, each a part of them (`check_share`), before they load.
    """
    if problem := _problem(path, meta):
        raise damaged(path, problem)


def check_share(path: str | Path, rank: int, world_size: int) -> str | None:
    """Return what is wrong with the files that this rank checks for all others, or None.

    `path` is a checkpoint or a folder inside one. The critic inside a checkpoint is checked separately.
    """
    folder = Path(path)
    root = folder if (folder / _META).exists() else folder.parent
    if not (root / _META).exists():
        return None
    checksums = read_meta(root).checksums
    inside = "" if root == folder else f"{folder.name}/"
    names = [name for name in checksums if name.startswith(inside)]
    if not inside:
        names = [name for name in names if not name.startswith(f"{CRITIC}/")]
    return wrong_checksum(root, checksums, share_of_rank(names, rank, world_size))


def damaged(path: Path, what: str) -> ConfigError:
    """Return the error for a damaged checkpoint, or a folder inside one; it names the newest intact one."""
    inside = _NAME.match(path.parent.name) and not _NAME.match(path.name)
    root = path.parent if inside else path
    folder = CheckpointFolder(root.parent)
    current = folder.rollout_ids()  # proposed before abandoned ones
    numbers = sorted(folder.complete(), key=lambda number: (number in current, number))
    others = [number for number in numbers if folder.path(number) != root]
    intact = next((n for n in reversed(others) if _is_intact(folder.path(n))), None)
    advice = f"use another one: --ckpt-step {intact}" if intact is not None else "there is no other"
    return ConfigError(f"the checkpoint {root} is damaged: {what}; {advice}")


def _is_intact(path: Path) -> bool:
    try:
        fields = json.loads((path / _META).read_text())
        fields.pop(_META_SUM, None)
        return _problem(path, CheckpointMeta(**fields)) is None
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _problem(path: Path, meta: CheckpointMeta) -> str | None:
    if problem := wrong_size(path, meta.sizes):
        return problem
    names = smallest_first(meta.sizes, _QUICK_BYTES)
    for name in names:
        if name.endswith(".json") and name not in meta.checksums:
            try:
                json.loads((path / name).read_text())
            except ValueError as error:
                return f"{name} cannot be read ({error})"
    return wrong_checksum(path, meta.checksums, names)


def _checksum(fields: dict[str, object]) -> str:
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True).encode()):08x}"


def how_to_continue(
    save: str | None,
    load: str | None,
    ckpt_step: int | None = None,
    start_rollout_id: int | None = None,
) -> str:
    """Return what to type after a run with these flags was interrupted."""
    if save is None:
        return "Nothing was saved (--save was not given): the same command starts over."
    good = CheckpointFolder(save).rollout_ids()
    if not good:
        return "Nothing had been saved yet: the same command starts over."
    where = f"The checkpoint after rollout {good[-1]} is in {save}"
    number = None if start_rollout_id is None else start_rollout_id - 1
    given = {"--ckpt-step": ckpt_step, "--start-rollout-id": number}
    flags = " and ".join(flag for flag, value in given.items() if value not in (None, good[-1]))
    if load != save:
        without = f", without {flags}" if flags else ""
        return f"{where}: continue with the same command and --load {save}{without}"
    if not flags:
        return f"{where}: the same command continues from it."
    first = next(value for value in (number, ckpt_step) if value is not None) + 1
    return (
        f"{where}: without {flags} the same command continues from it; as typed, it starts "
        f"again with rollout {first}."
    )
