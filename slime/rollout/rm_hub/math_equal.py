"""Whether two answers are equal as mathematics: by their normal form, else by math-verify.

math-verify runs in worker processes, which are killed and replaced when a comparison takes longer
than its time limit; the event loop only ever waits for them. A worker that was killed, or stood still with
the machine, is no answer: the question is asked once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import weakref
from collections import OrderedDict
from pathlib import Path

import orjson
import psutil

from slime.utils.errors import UserError

TIME_LIMIT_S = 5.0
_START_LIMIT_S = 60.0
_LONGEST_ANSWER = 1000  # characters; nobody writes a gradable answer that long
_REMEMBERED = 4096
_BUSY = 0.25  # share of its time that a worker computes unless something holds it up
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|,|!|;|:| |quad|%|\$)"
    r"|\\(?:text|mathrm|mathbf|textbf|mbox)(?=\{)|[$%~]|(?<!\d)\s+|\s+(?!\d)"
)
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}$")


async def math_equal(answer: str, label: str) -> bool:
    """Never raises on odd text, and takes no longer than the time limit once a worker is free and works."""
    left, right = normal_form(answer), normal_form(label)
    if not left or not right or len(answer) > _LONGEST_ANSWER or len(label) > _LONGEST_ANSWER:
        return False
    if left == right:
        return True
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return float(left) == float(right)
    return await _workers().equal(answer, label)


def normal_form(text: str) -> str:
    r"""`\dfrac{1}{2}\text{ cm}` and `\frac 12` alike: spacing, font, unit and size commands dropped."""
    text = text.strip().rstrip(".").strip()
    shorter = _UNITS.sub("", text)
    text = shorter if shorter.strip() else text
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree", "", text)
    text = _DROPPED.sub("", text)
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"[{},]", "", text)
    return text.removeprefix("{").removesuffix("}") if re.fullmatch(r"\{[^{}]*\}", text) else text


class MathWorkers:
    """A few worker processes of one event loop, started when first needed."""

    def __init__(self, count: int, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        for _ in range(count):
            self._idle.put_nowait(None)
        self._known: OrderedDict[tuple[str, str], bool] = OrderedDict()

    async def equal(self, answer: str, label: str) -> bool:
        key = (answer, label)
        if key not in self._known:
            reply = await self._ask(answer, label)
            if reply is None:
                reply = await self._ask(answer, label)
            self._known[key] = bool(reply)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]

    async def _ask(self, answer: str, label: str) -> bool | None:
        """None if the worker ended, or had no time to answer."""
        worker, begun_s = await self._idle.get(), 0.0
        try:
            if worker is None or worker.returncode is not None:
                worker = await _start()
            begun_s = _processor_s(worker)
            reply = await asyncio.wait_for(_exchange(worker, label, answer), self._time_limit_s)
            if reply is None:
                worker = _end(worker)
            return reply
        except asyncio.TimeoutError:
            assert worker is not None
            computed = _processor_s(worker) - begun_s > self._time_limit_s * _BUSY
            worker = _end(worker)
            return False if computed else None
        except BaseException:  # cancelled half way: its reply would answer the next question
            worker = _end(worker)
            raise
        finally:
            self._idle.put_nowait(worker)


async def _start() -> asyncio.subprocess.Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("math_worker.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        ready = await asyncio.wait_for(_exchange(worker, "x+x", "2x"), _START_LIMIT_S)
    except BaseException as error:
        _end(worker)
        if isinstance(error, asyncio.TimeoutError):
            raise UserError(f"the math grader did not start in {_START_LIMIT_S:.0f} s") from None
        raise
    if ready is not True:  # without this, every answer would be graded wrong and nobody would know
        _end(worker)
        assert worker.stderr is not None
        reason = (await worker.stderr.read()).decode(errors="replace").strip().splitlines()
        raise UserError(f"the math grader does not work: {reason[-1] if reason else ready}")
    return worker


async def _exchange(worker: asyncio.subprocess.Process, label: str, answer: str) -> bool | None:
    """The worker's reply; None if it died (out of memory, a crash in native code)."""
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(ConnectionError):
        worker.stdin.write(orjson.dumps([label, answer]) + b"\n")
        await worker.stdin.drain()
    line = await worker.stdout.readline()
    return orjson.loads(line) if line else None


def _processor_s(worker: asyncio.subprocess.Process) -> float:
    """What it has used so far."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(worker.pid).cpu_times()
        return times.user + times.system
    return 0.0


def _end(worker: asyncio.subprocess.Process | None) -> None:
    if worker is not None:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, MathWorkers] = (
    weakref.WeakKeyDictionary()
)


def _workers() -> MathWorkers:
    loop = asyncio.get_running_loop()
    if loop not in _by_loop:
        _by_loop[loop] = MathWorkers(count=max(1, min(4, (os.cpu_count() or 2) // 2)))
    return _by_loop[loop]
