"""One Python program that a model wrote, run to its end or to a limit, and the check that this is possible."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slime.core.errors import UserError
from slime.rollout.sandbox.bubblewrap import find_bwrap
from slime.rollout.sandbox.process import Limits, SandboxProcess, start

_PROGRAM = "/program.py"  # inside; the same in every traceback
_START_S = 2.0  # for starting the interpreter, on top of the program's own time
_PROBE = "import threading as t\nt.Thread(target=lambda: print('ok')).start()"
_PROBE_S = 60.0
_DOCKER = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)
_SETTINGS = {  # a kernel setting that forbids user namespaces, and the value that allows them
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user/max_user_namespaces": ("0", "65536"),
}


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


async def run_python(
    program: str,
    *,
    stdin: str = "",
    time_limit_s: float = 6.0,
    memory_bytes: int = 1 << 30,
    isolate: bool = True,
) -> RunResult:
    """Run the program to its end or to a limit; raise UserError where it cannot be isolated.

    It may start threads but no processes. A lone surrogate in it becomes a question mark.
    """
    if isolate:
        check_sandbox()
    limits = Limits(cpu_s=time_limit_s, memory_bytes=memory_bytes)
    async with program_slots():
        with _working_folder(isolate) as folder:
            process = await start(
                [sys.executable, "-I", _PROGRAM],
                limits=limits,
                files={_PROGRAM: program.encode(errors="replace")},
                isolate=isolate,
                cwd=folder,
            )
            try:
                text = stdin.encode(errors="replace")
                return await communicate(process, text, time_limit_s + _START_S, limits)
            finally:
                await process.close()


def _working_folder(isolate: bool) -> contextlib.AbstractContextManager[str | None]:
    """Yield a temporary folder without isolation; a sandbox has its own."""
    if isolate:
        return contextlib.nullcontext()
    return tempfile.TemporaryDirectory(prefix="slime-code-", ignore_cleanup_errors=True)


async def communicate(
    process: SandboxProcess, stdin: bytes, time_limit_s: float, limits: Limits
) -> RunResult:
    """Feed the program, collect its output up to the limit, and wait for its end."""
    outputs = (_Output(process.stdout, limits), _Output(process.stderr, limits))
    feeding = asyncio.ensure_future(_feed(process.stdin, stdin))
    tasks = [asyncio.ensure_future(output.read()) for output in outputs]
    limit = ""
    try:
        await asyncio.wait_for(_end(process, tasks), time_limit_s)
    except asyncio.TimeoutError:
        limit = "time"
    except OutputTooLong:
        limit = "output"
    finally:
        for task in (feeding, *tasks):
            task.cancel()
        await asyncio.gather(feeding, *tasks, return_exceptions=True)
    await process.close()
    texts = [b"".join(output.parts).decode(errors="replace") for output in outputs]
    status = process.returncode if process.returncode is not None else -9
    limit = limit or process.limit
    ended_early = limit in ("time", "output", "cpu")
    return RunResult(
        stdout=texts[0], stderr=texts[1], exit_status=status, timed_out=ended_early, limit=limit
    )


async def _end(process: SandboxProcess, reading: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*reading)
    await process.wait()


class OutputTooLong(Exception):
    """A program wrote more than its limit to one stream."""


class _Output:
    """The output of one stream so far."""

    def __init__(self, stream: asyncio.StreamReader, limits: Limits) -> None:
        self._stream, self._left = stream, limits.output_bytes
        self.parts: list[bytes] = []

    async def read(self) -> None:
        while part := await self._stream.read(1 << 16):
            self.parts.append(part[: self._left])
            self._left -= len(part)
            if self._left < 0:
                raise OutputTooLong


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
        stream.close()


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


def program_slots() -> asyncio.Semaphore:
    """Return the semaphore that lets this event loop run one program per processor at a time."""
    return _by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


@functools.cache
def check_sandbox() -> None:
    """Run a small program in a sandbox; raise UserError, with what to type, if that fails."""
    with ThreadPoolExecutor(1) as pool:  # the caller's thread may have an event loop already
        output, errors = pool.submit(asyncio.run, _probe()).result()
    if output != "ok\n":
        lines = errors.strip().splitlines()
        reason = lines[-1] if lines else "no output"
        raise UserError(
            f"programs of the model cannot be sandboxed on this system ({reason}): "
            f"{_advice(errors)}, or accept the risk with --allow-unsandboxed-code, which leaves "
            "limits of time and memory only"
        )


async def _probe() -> tuple[str, str]:
    process = await start([sys.executable, "-I", "-c", _PROBE], limits=Limits())
    try:
        streams = asyncio.gather(process.stdout.read(), process.stderr.read())
        output, errors = await asyncio.wait_for(streams, _PROBE_S)
    except asyncio.TimeoutError:
        return "", f"no answer within {_PROBE_S:.0f} s"
    finally:
        await process.close()
    return output.decode(errors="replace"), errors.decode(errors="replace")


def _advice(errors: str) -> str:
    """Return what to type, from what bubblewrap and the supervisor wrote."""
    if "nknown option" in errors:
        return "install bubblewrap 0.8 or newer"
    if "/usr/bin/prlimit" in errors:
        return "apt-get install util-linux"
    if "start new thread" in errors:
        return "use Linux 5.14 or newer, which counts processes per user namespace"
    if "Permission denied" in errors and os.geteuid() == 0:  # programs run as nobody
        return f"type chmod -R go+rX {find_bwrap()} {sys.base_prefix} {sys.prefix}"
    for name, (forbidding, allowing) in _SETTINGS.items():
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == forbidding:
            return f"type sysctl -w {name.replace('/', '.')}={allowing}"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return f"start the container with {_DOCKER}"
    return "allow user namespaces (sysctl user.max_user_namespaces)"
