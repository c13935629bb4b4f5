"""Python programs that a model wrote, run where they can do no harm.

    result = await run_python("print(1 + 1)")       # result.stdout == "2\\n"

No network, nothing to write to but an empty folder, no environment; limits of CPU time, memory, wall
time and output. Where the system allows no namespaces for that, a program runs only if the user said
so (`--allow-unsandboxed-code`), and then with the limits alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

_CHILD = str(Path(__file__).with_name("sandbox_child.py"))
_PROGRAM = "program.py"
_MOST_OUTPUT = 1 << 20  # bytes; a program that prints more is ended
_REAP_S = 10.0
_START_S = 2.0  # for starting the interpreter, on top of the program's own time
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@dataclass(kw_only=True, frozen=True)
class RunResult:
    stdout: str
    stderr: str
    exit_status: int
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_status == 0 and not self.timed_out


async def run_python(
    program: str,
    *,
    stdin: str = "",
    time_limit_s: float = 6.0,
    memory_bytes: int = 1 << 30,
    isolate: bool = True,
) -> RunResult:
    """Run the program to its end or to a limit; UserError where it cannot be isolated."""
    if isolate:
        check_isolation()
    async with _slots():
        with tempfile.TemporaryDirectory(prefix="slime-code-") as folder:
            settings = {
                "isolate": isolate,
                "cpu_s": math.ceil(time_limit_s),
                "memory_bytes": memory_bytes,
                "folder": folder,
            }
            _write_program(folder, program)
            process = await asyncio.create_subprocess_exec(
                sys.executable, _CHILD, json.dumps(settings),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**_ENVIRONMENT, "TMPDIR": folder},
                start_new_session=True,
            )  # fmt: skip
            try:
                return await _finish(process, stdin, time_limit_s)
            finally:
                _kill(process)
                await _reap_in_time(process)


def _write_program(folder: str, program: str) -> None:
    """Half a character (a lone surrogate) becomes a question mark."""
    (Path(folder) / _PROGRAM).write_bytes(program.encode(errors="replace"))


@functools.cache
def check_isolation() -> None:
    """UserError, with the way out, where the system refuses the namespaces."""
    with tempfile.TemporaryDirectory(prefix="slime-code-") as folder:
        settings = {"isolate": True, "cpu_s": 10, "memory_bytes": 1 << 30, "folder": folder}
        _write_program(folder, "print('ok')")
        probe = subprocess.run(
            [sys.executable, _CHILD, json.dumps(settings)],
            capture_output=True, text=True, env=_ENVIRONMENT, timeout=60, check=False,
        )  # fmt: skip
    if probe.stdout != "ok\n":
        reason = probe.stderr.strip().splitlines()
        raise UserError(
            "programs of the model cannot be run without network on this system "
            f"({reason[-1] if reason else probe.returncode}): allow user namespaces, or accept the "
            "risk with --allow-unsandboxed-code, which leaves limits of time and memory only"
        )


async def _finish(
    process: asyncio.subprocess.Process, stdin: str, time_limit_s: float
) -> RunResult:
    assert process.stdin and process.stdout and process.stderr
    readers = [asyncio.ensure_future(_read(s)) for s in (process.stdout, process.stderr)]
    feeding = asyncio.ensure_future(_feed(process.stdin, stdin))
    timed_out = False
    try:
        async with _deadline(time_limit_s + _START_S):
            await asyncio.gather(*readers)
            await process.wait()
    except (asyncio.TimeoutError, _TooMuchOutput):
        timed_out = True
        _kill(process)
    feeding.cancel()
    texts = [_text(r) for r in readers]
    await asyncio.gather(feeding, *readers, return_exceptions=True)
    status = process.returncode if process.returncode is not None else -9
    return RunResult(stdout=texts[0], stderr=texts[1], exit_status=status, timed_out=timed_out)


class _TooMuchOutput(Exception):
    pass


async def _read(stream: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while part := await stream.read(65536):
        parts.append(part)
        if sum(map(len, parts)) > _MOST_OUTPUT:
            raise _TooMuchOutput
    return b"".join(parts)


def _text(reader: asyncio.Future[bytes]) -> str:
    if not reader.done() or reader.cancelled():
        reader.cancel()
        return ""
    return "" if reader.exception() else reader.result().decode(errors="replace")


async def _feed(stream: asyncio.StreamWriter, text: str) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(text.encode(errors="replace"))
        await stream.drain()
        stream.close()


class _deadline:
    """asyncio.timeout, which Python 3.10 lacks."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._fired = seconds, False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._fire, task)

    def _fire(self, task: asyncio.Task[object]) -> None:
        self._fired = True
        task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._timer.cancel()
        if self._fired and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError


def _kill(process: asyncio.subprocess.Process) -> None:
    """The whole session it leads; in a process namespace everything ends with its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


async def _reap_in_time(process: asyncio.subprocess.Process) -> None:
    """What cannot be killed (a call into a file system that hangs) is left behind, not waited for."""
    try:
        await asyncio.wait_for(_reap(process), _REAP_S)
    except asyncio.TimeoutError:
        logger.warning(
            "a program of the model did not end when it was killed (pid %d)", process.pid
        )


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process. asyncio says it ended only when its pipes are read to their ends."""
    for stream in (process.stdout, process.stderr):
        assert stream
        while await stream.read(65536):
            pass
    await process.wait()


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
    weakref.WeakKeyDictionary()
)


def _slots() -> asyncio.Semaphore:
    """As many programs at a time as there are processors."""
    loop = asyncio.get_running_loop()
    if loop not in _by_loop:
        _by_loop[loop] = asyncio.Semaphore(max(1, os.cpu_count() or 1))
    return _by_loop[loop]
