"""The processes of one start: found by a variable in their environment and by their parents.

Nothing of another run on the same machine is ever touched: a process belongs to the start if it has the
marker in its environment, or descends from one that has.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import psutil

MARKER = "SLIME_CHAOS_START"


class Processes:
    """All processes that a start has had so far; call `look` often enough to see short-lived parents."""

    def __init__(self, marker: str) -> None:
        self._marker = f"{MARKER}={marker}".encode()
        self._strangers: set[tuple[int, float]] = set()
        self.seen: dict[int, psutil.Process] = {}

    def look(self) -> None:
        parents: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                known = self.seen.get(process.pid)
                if known == process or (process.pid, process.create_time()) in self._strangers:
                    continue
                if self._is_marked(process.pid) or process.ppid() in self.seen:
                    self.seen[process.pid] = process
                else:
                    parents[process.pid] = process
        for process in parents.values():
            with suppress(psutil.Error):
                self._strangers.add((process.pid, process.create_time()))

    def alive(self) -> list[psutil.Process]:
        self.look()
        return [process for process in self.seen.values() if is_alive(process)]

    def find(self, target: str, run_dir: Path) -> psutil.Process | None:
        """The process of `driver`, `manager`, `trainer_0`, `engine_1`, `engine_actor_1`, `raylet`...

        None while it has not started.
        """
        if target.startswith("engine"):
            engine = _engine(run_dir, target.rpartition("_")[2])
            if engine is None or not target.startswith("engine_actor"):
                return engine
            with suppress(psutil.Error):
                return engine.parent()
            return None
        self.look()
        for process in self.seen.values():
            with suppress(psutil.Error, OSError):
                if is_alive(process) and self._is(process, target, run_dir):
                    return process
        return None

    def _is(self, process: psutil.Process, target: str, run_dir: Path) -> bool:
        if target in ("raylet", "gcs"):
            name = "raylet" if target == "raylet" else "gcs_server"
            return process.name() == name
        log = "rollout" if target == "manager" else target
        written = os.readlink(f"/proc/{process.pid}/fd/2")
        return written == str(run_dir.resolve() / "logs" / f"{log}.log")

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


def is_alive(process: psutil.Process) -> bool:
    """A zombie, which only waits for its parent, is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _engine(run_dir: Path, index: str) -> psutil.Process | None:
    """By the file in which the engine's process writes its port."""
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        facts = json.loads((run_dir / "logs" / f"engine_{index}.port").read_text())
        engine = psutil.Process(facts["pid"])
        return engine if is_alive(engine) else None
    return None
