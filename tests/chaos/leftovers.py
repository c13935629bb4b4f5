"""What a start left behind: processes, shared memory, temporary folders, half-written files, ports."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.modes import Folders
from tests.chaos.processes import Processes, is_alive

GRACE_S = 10.0  # that processes have to end after the driver
_SHARED = Path("/dev/shm")
# Ray keeps its folder of logs on purpose.
_ALLOWED_TEMPORARY = re.compile(r"^ray$")


@dataclass(kw_only=True)
class Leftovers:
    """`lingered_s`: when the last process was gone, or how long was waited for it."""

    lingered_s: float = 0.0
    processes: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory or self.temporary or self.ports)

    def __str__(self) -> str:
        parts = {
            "processes": self.processes,
            "shared memory": self.shared_memory,
            "temporary": self.temporary,
            "ports": self.ports,
        }
        return "; ".join(f"{name}: {found}" for name, found in parts.items() if found)


def listen_ports(processes: Processes) -> set[int]:
    """Ports on which the run's processes listen now."""
    found: set[int] = set()
    for process in processes.alive():
        with suppress(psutil.Error):
            connections = process.net_connections("inet")
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def shared_memory() -> set[str]:
    return {entry.name for entry in _SHARED.iterdir()}


def find_leftovers(
    processes: Processes,
    folders: Folders,
    *,
    shared_before: set[str],
    ports: set[int],
    grace_s: float = GRACE_S,
) -> Leftovers:
    """Wait for the processes to end, then look at the rest; what stays is ended here."""
    found = Leftovers()
    begun = time.monotonic()
    while (alive := processes.alive()) and time.monotonic() - begun < grace_s:
        time.sleep(0.1)
    found.lingered_s = round(time.monotonic() - begun, 1)
    for process in alive:
        with suppress(psutil.Error):
            found.processes.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    found.ports = sorted(ports & listen_ports(processes))
    end_all(alive)
    found.shared_memory = sorted(_unused(shared_memory() - shared_before, processes))
    found.temporary = sorted(_temporary(folders))
    return found


def end_all(processes: list[psutil.Process]) -> None:
    """Kill what the run itself did not end, so that it does not disturb the next start."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + 5  # without waiting on them: a parent here wants their status
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def partial_files(folders: Folders) -> list[str]:
    """Files and folders that were being written, of a run that has come to its end."""
    return sorted(str(p.relative_to(folders.disk)) for p in folders.disk.rglob("*tmp"))


def _temporary(folders: Folders) -> list[str]:
    if not folders.temporary.exists():
        return []
    return [e.name for e in folders.temporary.iterdir() if not _ALLOWED_TEMPORARY.match(e.name)]


def _unused(names: set[str], processes: Processes) -> set[str]:
    """Those of this start: named by one of its processes, or open in no process that lives.

    Other runs on the machine have segments of their own.
    """
    ours = {str(pid) for pid in processes.seen}
    named = {name for name in names if ours & set(re.findall(r"\d+", name))}
    rest = names - named
    if rest:
        time.sleep(1.0)  # one of another run, that is being made or removed
        rest = {name for name in rest & shared_memory() if not _is_open(name)}
    return {name for name in named | rest if (_SHARED / name).exists()}


def _is_open(name: str) -> bool:
    path = str(_SHARED / name)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(
                link.readlink() == Path(path) for link in Path(f"/proc/{process.pid}/fd").iterdir()
            ):
                return True
    return False
