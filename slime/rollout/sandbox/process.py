"""Processes in a sandbox of their own, and the limits that they run under."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.rollout.sandbox.bubblewrap import WORK, bwrap_arguments, find_bwrap, shown_paths
from slime.rollout.sandbox.seccomp import build_filter
from slime.utils.machine import memory_file

# By path, without slime and site-packages on the way: a supervisor starts in milliseconds.
_SUPERVISOR = f"""import sys
sys.path.append({str(Path(__file__).parent)!r})
import supervisor
supervisor.main()"""
_REAP_S = 10.0
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
    "HOME": WORK, "TMPDIR": "/tmp",
}  # fmt: skip


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


class SandboxProcess:
    """A running program and everything it started.

    `stdin`, `stdout` and `stderr` are asyncio streams. A stream that is not read stops the program when
    its pipe is full; its output is not buffered here without limit.
    """

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self.pid = process.pid  # of the supervisor
        self.limit = ""  # the limit that ended it, known after wait()
        self._process, self._control = process, control

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        """Kill the program and everything it started; `wait()` returns once that is done."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    async def wait(self) -> int:
        """Wait for the end of the program without reading its streams, and return its status."""
        status = await self._process.wait()
        if self._control.fileno() >= 0:
            with contextlib.suppress(OSError, ValueError):
                self.limit = json.loads(self._control.recv(4096))["limit"]
            self._control.close()
        return status

    async def close(self) -> None:
        """Kill the program, drop what it still writes, and wait until nothing of it is left."""
        self.kill()
        self.stdin.close()
        drained = asyncio.gather(_drain(self.stdout), _drain(self.stderr), self.wait())
        try:
            await asyncio.wait_for(drained, _REAP_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def start(
    argv: Iterable[str],
    *,
    limits: Limits | None = None,
    read_only: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    inherit: Iterable[int] = (),
    network: bool = False,
    isolate: bool = True,
    cwd: str | None = None,
) -> SandboxProcess:
    """Start a program in a new sandbox.

    It sees the interpreter that runs slime with its packages, the paths in `read_only`, and an empty
    working folder; of the environment only `env`. `files` are written to these paths inside,
    and the descriptors in `inherit` stay open. `network` allows sockets, in a network namespace that has a
    loopback interface and no other. Without `isolate` only the limits of each process apply, and it runs in `cwd`.
    """
    limits, inherit, read_only = limits or Limits(), tuple(inherit), tuple(read_only)
    control, theirs = socket.socketpair()
    given = [theirs.fileno(), _file_of(build_filter(forks=limits.forks, network=network))]
    contents = {path: _file_of(data) for path, data in (files or {}).items()}
    given += contents.values()
    if isolate:
        executable, shown = find_bwrap(), shown_paths(read_only)
        command = bwrap_arguments(
            argv, limits=limits, read_only=read_only, files=contents, network=network
        )
    else:
        command = [f"/dev/fd/{contents[word]}" if word in contents else word for word in argv]
        executable, shown = command[0], []
    folders = {} if isolate or cwd is None else {"HOME": cwd, "TMPDIR": cwd}
    settings = {
        **asdict(limits), "isolate": isolate, "executable": executable, "shown": shown,
        "control_fd": given[0], "seccomp_fd": given[1], "close_fds": [*given[1:], *inherit],
    }  # fmt: skip
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _SUPERVISOR, json.dumps(settings), *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**ENVIRONMENT, **folders, **(env or {})},
            cwd="/" if isolate else cwd,
            pass_fds=(*given, *inherit),
            start_new_session=True,
            limit=limits.output_bytes,
        )  # fmt: skip
    finally:
        theirs.close()
        for descriptor in given[1:]:
            os.close(descriptor)
    return SandboxProcess(process, control)


def _file_of(data: bytes) -> int:
    """Return a descriptor of an anonymous file with this content, at its beginning."""
    descriptor = memory_file("sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
