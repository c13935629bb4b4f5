"""Breaks a start: waits for the moment, then sends the signal, fills the disk or damages a file."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.modes import SAVE_INTERVAL, Folders, Mode
from tests.chaos.plan import Fault, Moment
from tests.chaos.processes import Processes
from tests.e2e import runs

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "hup": signal.SIGHUP,
}
ONLY_CHECKPOINT = "of the only checkpoint"
_POLL_S = 0.005
_FIND_S = 30.0  # a target that has not started, or is being replaced, is waited for so long
_PIECES = (1 << 26, 1 << 20, 1 << 12)


@dataclass(kw_only=True)
class Start:
    """One start of the command, as far as faults need to know it."""

    mode: Mode
    folders: Folders
    pid: int  # of the driver, which leads a process group
    began: float  # time.monotonic()
    loop_s: float  # how long the undisturbed run takes after its start
    processes: Processes
    ended: Callable[[], bool]


def wait_for(moment: Moment, start: Start) -> bool:
    """Until the moment; False if the start ended before it."""
    in_start = moment.phase in ("early", "start")
    reached = _after(start, moment.delay_s) if in_start else _watcher(moment, start)
    while not reached():
        if start.ended():
            return False
        time.sleep(_POLL_S)
    if not in_start:
        time.sleep(moment.fraction * start.loop_s if moment.phase == "time" else moment.delay_s)
    return not start.ended()


def inject(fault: Fault, start: Start) -> str | None:
    """Do it; what was done in words, or None where there was nothing to do it to."""
    time.sleep(fault.gap_s)
    if fault.target == "disk":
        return _fill_disk(start.folders.disk, fault.seconds)
    if fault.target == "checkpoint":
        return damage(start.folders.checkpoints, fault.kind)
    number = _SIGNALS[fault.kind]
    if fault.target == "driver_group":
        with suppress(ProcessLookupError):
            os.killpg(start.pid, number)
            return f"{number.name} to process group {start.pid}"
        return None
    process = _find(fault.target, start)
    if process is None:
        return None
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        if number == signal.SIGSTOP:
            _continue_after(process, fault.seconds)
        return f"{number.name} to {fault.target} (pid {process.pid})"
    return None


def damage(checkpoints: Path, kind: str) -> str | None:
    """Damage a file of the newest complete checkpoint; a run that saves in the background may have no other."""
    how, _, what = kind.partition("_")
    complete = sorted(checkpoints.glob("iter_???????"))
    if what == "tracker":
        file = checkpoints / "latest_checkpointed_iteration.txt"
    else:
        file = _file_of(complete[-1], what) if complete else None
    if file is None or not file.exists():
        return None
    _DAMAGES[how](file)
    only = f" {ONLY_CHECKPOINT}" if len(complete) == 1 else ""
    return f"{how} {file.relative_to(checkpoints)}{only}"


def release_disk(disk: Path) -> None:
    (disk / "ballast").unlink(missing_ok=True)


def last_trained(folders: Folders) -> int:
    """The last rollout whose training is in metrics.jsonl."""
    with suppress(OSError, ValueError):
        return max((r["rollout_id"] for r in runs.metrics(folders.run_dir, "train")), default=-1)
    return -1


# ---- moments


def _after(start: Start, seconds: float) -> Callable[[], bool]:
    return lambda: time.monotonic() - start.began >= seconds


def _watcher(moment: Moment, start: Start) -> Callable[[], bool]:
    """Whether the phase has been reached in this start, at or behind the rollout."""
    folders = start.folders
    if moment.phase == "save":
        return lambda: (
            any(folders.checkpoints.glob("iter_*.tmp"))
            and last_trained(folders) >= min(moment.rollout, start.mode.num_rollout - SAVE_INTERVAL)
        )
    if moment.phase == "export":
        return lambda: any(p.exists() for p in (folders.hf, folders.hf.with_name("hf.slime-tmp")))
    if (
        moment.phase == "update"
    ):  # behind the first training of this start, at or behind the rollout
        begin = _size(folders.signals)
        return lambda: (
            last_trained(folders)
            >= max(
                (
                    r
                    for p, r in _read(folders.signals, begin)
                    if p == "train" and r >= moment.rollout
                ),
                default=start.mode.num_rollout,
            )
        )
    return _signalled(moment, folders.signals)


def _signalled(moment: Moment, path: Path) -> Callable[[], bool]:
    """By the lines that hooks append; those of earlier starts do not count."""
    begin = _size(path)

    def reached() -> bool:
        lines = _read(path, begin)
        if moment.phase == "time":
            return bool(lines)
        if moment.phase != "eval":
            return any(p == moment.phase and r >= moment.rollout for p, r in lines)
        if moment.rollout < 0:
            return any(p == "eval" for p, _ in lines)
        # The evaluation after `rollout` is the first one behind its training.
        trained = [i for i, (p, r) in enumerate(lines) if p == "train" and r >= moment.rollout]
        return bool(trained) and any(p == "eval" for p, _ in lines[trained[0] :])

    return reached


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, begin: int) -> list[tuple[str, int]]:
    """Phase and rollout of every line behind `begin`."""
    if not path.exists():
        return []
    with path.open() as file:
        file.seek(begin)
        lines = [line.split() for line in file.read().splitlines()]
    return [(phase, int(rollout)) for phase, rollout in lines]


# ---- faults


def _find(target: str, start: Start) -> psutil.Process | None:
    if target == "driver":
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(start.pid)
        return None
    deadline = time.monotonic() + _FIND_S
    while not start.ended():
        process = start.processes.find(target, start.folders.run_dir)
        if process is not None:
            return process
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return None


def _continue_after(process: psutil.Process, seconds: float) -> None:
    def go_on() -> None:
        time.sleep(seconds)
        with suppress(psutil.NoSuchProcess):
            process.resume()

    threading.Thread(target=go_on, daemon=True).start()


def _fill_disk(disk: Path, seconds: float) -> str:
    """`seconds` 0: until `release_disk`. Taken piece by piece, for the run writes there meanwhile."""
    taken = 0
    with (disk / "ballast").open("wb") as file:
        for piece in _PIECES:
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), taken, piece)
                    taken += piece
    if seconds:
        threading.Timer(seconds, release_disk, [disk]).start()
    return f"{taken // 2**20} MiB of {disk} taken"


def _file_of(checkpoint: Path, what: str) -> Path | None:
    if what == "meta":
        return checkpoint / "meta.json"
    if what == "rollout":
        return checkpoint / "rollout.json"
    known = {"meta.json", "rollout.json"}
    files = [f for f in checkpoint.rglob("*") if f.is_file() and f.name not in known]
    return max(files, key=lambda file: (file.stat().st_size, file.name), default=None)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    """64 bits, anywhere; of the same size afterwards."""
    content = bytearray(file.read_bytes())
    dice = random.Random(len(content))
    for _ in range(64):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(bytes(content))


def _zero(file: Path) -> None:
    """A block in the middle, as a disk that lost a write leaves it."""
    content = bytearray(file.read_bytes())
    middle, length = len(content) // 2, min(32768, len(content) // 4)
    content[middle : middle + length] = bytes(length)
    file.write_bytes(bytes(content))


def _garble(file: Path) -> None:
    file.write_bytes(re.sub(rb"[\w{]", b"#", file.read_bytes()))


_DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncate": _truncate,
    "flip": _flip,
    "zero": _zero,
    "garble": _garble,
    "delete": Path.unlink,
}
