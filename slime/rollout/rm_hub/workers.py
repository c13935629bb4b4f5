"""Worker processes for graders that evaluate or parse text of a model, or may take long.

A worker runs in the sandbox, without environment, network and files. One that exceeds the time limit is
killed and replaced; the event loop is never blocked. If a worker died, or made no progress because the
machine was overloaded, the question is sent once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import orjson
import psutil

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.rollout.base_types import RewardArgs
from slime.rollout.sandbox import Limits, SandboxProcess, start
from slime.utils.reasoning_tasks import HASH_SEED

_INSIDE = Path(__file__).with_name("inside")
_START_LIMIT_S = 60.0
_MIN_CPU_SHARE = 0.25  # of the time limit: with less CPU time the machine was too busy, not the question too hard
_NO_REPLY = object()
_MAX_REASON_BYTES = 1 << 16
_LIMITS = Limits(memory_bytes=4 << 30)  # they may start no processes
# The processes of each worker once it is ready: to list them reads all of /proc.
_members: weakref.WeakKeyDictionary[SandboxProcess, list[psutil.Process]] = (
    weakref.WeakKeyDictionary()
)


class Workers:
    """A few processes of one event loop that answer one kind of question, started on demand."""

    def __init__(
        self, kind: str, *, time_limit_s: float, count: int | None = None, isolate: bool = True
    ) -> None:
        self.time_limit_s = time_limit_s
        self._kind, self._isolate = kind, isolate
        self._idle: asyncio.Queue[SandboxProcess | None] = asyncio.Queue()
        for _ in range(count or max(1, min(4, (os.cpu_count() or 2) // 2))):
            self._idle.put_nowait(None)

    async def ask(self, question: Any) -> Any:
        """Return the answer; None if it took longer than the time limit or the grader cannot decide."""
        reply = await self._ask(question)
        if reply is _NO_REPLY:
            reply = await self._ask(question)
        return None if reply is _NO_REPLY else reply

    async def _ask(self, question: Any) -> Any:
        worker, cpu_s = await self._idle.get(), 0.0
        try:
            if worker is None or worker.returncode is not None:
                worker = await _start(self._kind, self._isolate)
            cpu_s = _cpu_seconds(worker)
            reply = await asyncio.wait_for(_exchange(worker, question), self.time_limit_s)
        except asyncio.TimeoutError:
            assert worker is not None
            computed = _cpu_seconds(worker) - cpu_s > self.time_limit_s * _MIN_CPU_SHARE
            worker = _end(worker)
            return None if computed else _NO_REPLY
        except BaseException:  # cancelled: a late reply would answer the next question
            worker = _end(worker)
            raise
        else:
            if reply is None:
                worker = _end(worker)
            return _answer(reply)
        finally:
            self._idle.put_nowait(worker)


def workers(kind: str, *, time_limit_s: float, isolate: bool) -> Workers:
    """Return the workers of this event loop for the questions of `inside/<kind>.py`."""
    pools = _by_loop.setdefault(asyncio.get_running_loop(), {})
    key = (kind, isolate)
    if key not in pools:
        pools[key] = Workers(kind, time_limit_s=time_limit_s, isolate=isolate)
    return pools[key]


def isolated(args: RewardArgs) -> bool:
    """Return whether code and answers of the model run in the sandbox (no --allow-unsandboxed-code)."""
    return not (isinstance(args, Args) and args.allow_unsandboxed_code)


def _answer(reply: dict[str, Any] | None) -> Any:
    if reply is None:
        return _NO_REPLY
    if "mistake" in reply:
        raise UserError(str(reply["mistake"])[:1000])
    return reply.get("value")


async def _start(kind: str, isolate: bool) -> SandboxProcess:
    scripts = [str(_INSIDE / "serve.py"), str(_INSIDE / f"{kind}.py")]
    worker = await start(
        [sys.executable, "-s", *scripts],
        limits=_LIMITS,
        read_only=scripts,
        env=HASH_SEED,
        isolate=isolate,
    )
    try:
        ready = await asyncio.wait_for(_read(worker), _START_LIMIT_S)
    except BaseException as error:
        _end(worker)
        if isinstance(error, asyncio.TimeoutError):
            raise UserError(
                f"the grader {kind} did not start within {_START_LIMIT_S:.0f} s"
            ) from None
        raise
    if ready is None:  # without this check every answer would silently be graded wrong
        worker.kill()  # before its errors are read, and these before `_end` drops them
        errors = await worker.stderr.read(_MAX_REASON_BYTES)
        _end(worker)
        reason = errors.decode(errors="replace").strip().splitlines()
        raise UserError(f"the grader {kind} does not work: {reason[-1] if reason else 'it exited'}")
    with contextlib.suppress(psutil.Error):
        supervisor = psutil.Process(worker.pid)
        _members[worker] = [supervisor, *supervisor.children(recursive=True)]
    return worker


async def _exchange(worker: SandboxProcess, question: Any) -> dict[str, Any] | None:
    with contextlib.suppress(ConnectionError):
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        await worker.stdin.drain()
    return await _read(worker)


async def _read(worker: SandboxProcess) -> dict[str, Any] | None:
    """Return the worker's next line; None if it died (out of memory, a crash) or did not write JSON."""
    try:
        reply = orjson.loads(await worker.stdout.readline())
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _cpu_seconds(worker: SandboxProcess) -> float:
    """Return the CPU time that the processes of the worker have used so far."""
    total = 0.0
    for process in _members.get(worker, ()):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _end(worker: SandboxProcess | None) -> None:
    if worker is not None:
        closing = asyncio.get_running_loop().create_task(worker.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references to tasks
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, bool], Workers]] = (
    weakref.WeakKeyDictionary()
)
