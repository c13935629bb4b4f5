"""What a sandbox may use, and how a program in it ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, frozen=True)
class Limits:
    """Limits over everything in a sandbox together, children and shared memory included.

    Example: `Limits(memory_bytes=2 << 30, processes=64, forks=True)` lets a shell start up to 64
    processes and threads, which are killed when together they hold more than 2 GiB.
    """

    memory_bytes: int = 1 << 30  # processes, shared memory and files of the sandbox together
    cpu_s: float | None = None  # CPU time of all processes together; None: no limit
    processes: int = 64  # processes and threads together
    forks: bool = False  # whether a program may start processes; threads are always possible
    disk_bytes: int = 64 << 20  # the working folder and /tmp together, which are in memory
    output_bytes: int = 1 << 20  # per stream of one command
    open_files: int = 64  # per process


@dataclass(kw_only=True, frozen=True)
class RunResult:
    """The end of a program. `limit` names the limit that ended it: time, output, memory, ..."""

    stdout: str
    stderr: str
    exit_status: int
    timed_out: bool = False
    limit: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_status == 0 and not self.timed_out and not self.limit
