"""Worker processes for graders: whatever evaluates, parses or may take long on a model's text.

A worker runs in the sandbox, without environment, network and files. One that takes longer than the time
limit is killed and replaced; the event loop only ever waits. A worker that was killed, or stood still
together with the machine, has not answered: the question is asked once more.
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

from slime.core.errors import UserError
from slime.rollout.sandbox import Limits, SandboxProcess, start
from slime.utils.reasoning_tasks import HASH_SEED

_INSIDE = Path(__file__).with_name("inside")
_START_LIMIT_S = 60.0
_BUSY = 0.25  # share of its time that a worker computes unless something holds it up
_NO_REPLY = object()
_MOST_REASON = 1 << 16
_LIMITS = Limits(memory_bytes=4 << 30)


class Workers:
    """A few processes of one event loop that answer one kind of question, started when needed."""

    def __init__(
        self, kind: str, *, time_limit_s: float, count: int | None = None, isolate: bool = True
    ) -> None:
        self.time_limit_s = time_limit_s
        self._kind, self._isolate = kind, isolate
        self._idle: asyncio.Queue[SandboxProcess | None] = asyncio.Queue()
        for _ in range(count or max(1, min(4, (os.cpu_count() or 2) // 2))):
            self._idle.put_nowait(None)

    async def ask(self, question: Any) -> Any:
        """Return the answer; None if the question is too hard for the time limit or for the grader."""
        reply = await self._ask(question)
        if reply is _NO_REPLY:
            reply = await self._ask(question)
        return None if reply is _NO_REPLY else reply

    async def _ask(self, question: Any) -> Any:
        worker, begun_s = await self._idle.get(), 0.0
        try:
            if worker is None or worker.returncode is not None:
                worker = await _start(self._kind, self._isolate)
            begun_s = _processor_s(worker)
            reply = await asyncio.wait_for(_exchange(worker, question), self.time_limit_s)
        except asyncio.TimeoutError:
            assert worker is not None
            computed = _processor_s(worker) - begun_s > self.time_limit_s * _BUSY
            worker = _end(worker)
            return None if computed else _NO_REPLY
        except BaseException:  # cancelled half way: its reply would answer the next question
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
            raise UserError(f"the grader {kind} did not start in {_START_LIMIT_S:.0f} s") from None
        raise
    if ready is None:  # without this, every answer would be graded wrong and nobody would know
        _end(worker)
        reason = (
            (await worker.stderr.read(_MOST_REASON)).decode(errors="replace").strip().splitlines()
        )
        raise UserError(f"the grader {kind} does not work: {reason[-1] if reason else 'it ended'}")
    return worker


async def _exchange(worker: SandboxProcess, question: Any) -> dict[str, Any] | None:
    with contextlib.suppress(ConnectionError):
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        await worker.stdin.drain()
    return await _read(worker)


async def _read(worker: SandboxProcess) -> dict[str, Any] | None:
    """Return the worker's next line; None if it died (out of memory, a crash) or wrote no JSON."""
    try:
        reply = orjson.loads(await worker.stdout.readline())
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _processor_s(worker: SandboxProcess) -> float:
    """Return the CPU time that the worker and what it started have used so far."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(worker.pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def _end(worker: SandboxProcess | None) -> None:
    if worker is not None:
        closing = asyncio.get_running_loop().create_task(worker.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()  # the loop itself holds no reference to its tasks
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, bool], Workers]] = (
    weakref.WeakKeyDictionary()
)
