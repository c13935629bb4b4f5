"""Folders of --save-hf: written to a temporary folder, renamed when complete, with a marker file.

<path>/                     complete: it has the marker, slime_export.json
<path>.slime-tmp/           being written; complete once it has the marker
<path>.slime-replacing/     the previous export while it is replaced; then removed
<path>.previous/            what was at <path> and was not an export of slime; kept

`export_info(path)` returns which run made an export.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from slime.runlog.checkpoint_files import sync_file, sync_tree
from slime.runlog.jsonl import replace_file

logger = logging.getLogger(__name__)

MARKER = "slime_export.json"


@dataclass(kw_only=True, frozen=True)
class ExportInfo:
    """What an export holds and which run made it."""

    rollout_id: int | None = None  # the last rollout trained on; None: unknown or outdated
    run_dir: str | None = None  # of the run, absolute; None: not made by a run


def export_info(path: str | Path) -> ExportInfo | None:
    """Return the marker of the complete export at `path`; None if there is none."""
    try:
        fields = json.loads((Path(path) / MARKER).read_text())
        return ExportInfo(rollout_id=fields["rollout_id"], run_dir=fields["run_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def new_export(path: str | Path, info: ExportInfo | None = None) -> Iterator[Path]:
    """Yield an empty folder to write an export into; mark it as complete and move it to `path` at the end.

    After an error what was written is removed.
    """
    target, partial, replaced = _names(path)
    try:
        recover_export(path)
        partial.mkdir(parents=True)
        yield partial
        sync_tree(partial)
        marker = json.dumps(asdict(info or ExportInfo())).encode()
        replace_file(partial / MARKER, marker + b"\n")
        sync_file(partial)
        _move_to_target(target, partial, replaced)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def recover_export(path: str | Path) -> None:
    """Finish or undo the export of a killed process: afterwards there is a complete <path> or nothing."""
    target, partial, replaced = _names(path)
    if export_info(partial):
        _move_to_target(target, partial, replaced)
    elif replaced.exists() and not target.exists():
        replaced.rename(target)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def mark_outdated(path: str | Path, rollout_id: int) -> None:
    """Remove the rollout_id from an export's marker if that rollout will be trained again."""
    info = export_info(path)
    if info and info.rollout_id is not None and info.rollout_id >= rollout_id:
        outdated = ExportInfo(run_dir=info.run_dir)
        replace_file(Path(path) / MARKER, json.dumps(asdict(outdated)).encode() + b"\n")


def _move_to_target(target: Path, partial: Path, replaced: Path) -> None:
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced if _is_ours(target) else _free_name(target))
    partial.rename(target)
    sync_file(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _names(path: str | Path) -> tuple[Path, Path, Path]:
    """Return the export, the folder it is written to, and the one it replaces, on one filesystem."""
    target = Path(path).resolve()
    ends = ("slime-tmp", "slime-replacing")  # unlikely names for folders of the user
    partial, replaced = (target.with_name(f"{target.name}.{end}") for end in ends)
    return target, partial, replaced


def _is_ours(target: Path) -> bool:
    return (target / MARKER).exists() or not any(target.iterdir())


def _free_name(target: Path) -> Path:
    names = (f"{target.name}.previous{f'-{n}' if n else ''}" for n in count())
    free = next(path for path in map(target.with_name, names) if not path.exists())
    logger.warning("%s is not an export of slime: it was renamed to %s", target, free)
    return free
