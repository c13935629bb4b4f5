"""Whether other programs disturbed a timed run (Linux): their share of all cores while it ran."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_CORES = os.cpu_count() or 1


class OthersWatch:
    """Inside `with`, adds up the CPU time of processes that do not carry `tag` in their environment.

    Processes started by a run inherit its environment, so a variable tells them from the rest.
    """

    def __init__(self, tag: str, interval: float = 1.0) -> None:
        self._tag, self._interval = f"{tag}=".encode(), interval
        self._stop = threading.Event()
        self._seconds = 0.0

    def __enter__(self) -> OthersWatch:
        self._started = time.monotonic()
        self._last = _cpu_seconds(self._tag)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.share = self._seconds / (_CORES * (time.monotonic() - self._started))

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            now = _cpu_seconds(self._tag)
            self._seconds += sum(now[pid] - self._last.get(pid, now[pid]) for pid in now)
            self._last = now


def wait_quiet(window: float, limit: float, share: float) -> None:
    """Wait until other processes use at most `share` of all cores for a window, or for `limit` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        before = _busy_seconds()
        time.sleep(window)
        if (_busy_seconds() - before) / (window * _CORES) < share:
            return


def _cpu_seconds(tag: bytes) -> dict[int, float]:
    """Return the CPU seconds by process id, of processes without the tag and other than this one."""
    seconds = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if tag in (folder / "environ").read_bytes():
                continue
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / _TICKS
