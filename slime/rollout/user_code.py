"""Calls into user code: off the event loop that generates, with a deadline, and whatever it does stays there.

A hook may block, never come back, exit the interpreter, raise what is no Exception, or take no notice of
a cancellation. None of these may end the event loop or leave anybody waiting forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from slime.utils.http import background_loop

T = TypeVar("T")
logger = logging.getLogger(__name__)

_REWARDS = "slime-rewards"  # the loop of async hooks that may block
_THREADS = 32
_ASYNCIO = str(Path(asyncio.__file__).parent)
_CANCEL_S = 5.0  # for what is cancelled to end


class HookEndedError(Exception):
    """The code did not return, and what it raised instead is no Exception."""


@dataclass(kw_only=True, frozen=True)
class Call:
    """User code under way."""

    what: str  # e.g. "--custom-rm-path my.judge"
    since: float  # time.monotonic()
    place: str  # where it stands: "judge.py:12 in score"


class Calls:
    """User code under way in one rollout; looked at from any thread."""

    def __init__(self) -> None:
        self._begun: dict[asyncio.Task[Any], tuple[str, float, Coroutine[Any, Any, Any]]] = {}

    @contextlib.contextmanager
    def during(
        self, task: asyncio.Task[Any], what: str, call: Coroutine[Any, Any, Any]
    ) -> Iterator[None]:
        self._begun[task] = (what, time.monotonic(), call)
        try:
            yield
        finally:
            del self._begun[task]

    def under_way(self) -> list[Call]:
        """All of them, the longest first."""
        calls = sorted(self._begun.values(), key=lambda entry: entry[1])
        return [Call(what=what, since=since, place=_place(call)) for what, since, call in calls]

    def longest(self) -> Call | None:
        return next(iter(self.under_way()), None)


class Turn:
    """How long a call has taken. While it waits behind others, that is half the time since one of them ended:
    many slow calls one after another are no reason to give up on the last, one that never ends is, and is
    given up on first."""

    _last_end: ClassVar[dict[str, float]] = {}  # by what they wait for

    def __init__(self, queue: str) -> None:
        self._queue, self._since, self._begun = queue, time.monotonic(), False

    @classmethod
    def begun_now(cls) -> Turn:
        turn = cls("")
        turn._begun = True
        return turn

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Around the code itself."""
        self._since, self._begun = time.monotonic(), True
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """The code ended, or nobody waits for it any more."""
        if self._begun:
            self._last_end[self._queue] = time.monotonic()

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        if self._begun:
            return now - self._since
        return (now - max(self._since, self._last_end.get(self._queue, 0.0))) / 2


async def contain(
    call: Coroutine[Any, Any, T],
    *,
    what: str,
    limit_s: float,
    turn: Turn | None = None,
    calls: Calls | None = None,
) -> T:
    """Await user code in a task of its own; what comes out is its result or an Exception.

    While it is under way it is one of `calls`.

    An exit would end the event loop, and a cancellation that the code brought about itself would look
    like one from outside.
    """
    task = asyncio.get_running_loop().create_task(_without_exits(call))
    with (calls or Calls()).during(task, what, call):
        await _wait(task, call, what, limit_s, turn or Turn.begun_now())
    if task.cancelled():
        raise HookEndedError("CancelledError: it cancelled itself")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise HookEndedError(f"{type(error).__name__}: {error}") from error
    return task.result()


async def _wait(
    task: asyncio.Task[Any], call: Coroutine[Any, Any, Any], what: str, limit_s: float, turn: Turn
) -> None:
    try:
        while not task.done():
            if turn.seconds >= limit_s:
                turn.end()
                raise TimeoutError(f"{what} took longer than {limit_s:.0f} s")
            await asyncio.wait([task], timeout=max(limit_s - turn.seconds, 0.01))
    finally:
        await _end(task, what)
        if task.done():
            call.close()  # in case it was cancelled before it had begun


async def elsewhere(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await user code on a second loop, which it may block without holding up the first."""
    loop = background_loop(_REWARDS)
    if loop is asyncio.get_running_loop():
        return await coroutine
    call = asyncio.run_coroutine_threadsafe(_without_exits(coroutine), loop)
    return await asyncio.wrap_future(call)


async def on_main_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await, also from the second loop, what belongs to the first: the engines and their slots."""
    if threading.current_thread().name != _REWARDS:
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, background_loop()))


async def in_thread(fn: Callable[..., T], *args: Any, num_threads: int = _THREADS) -> T:
    """Run a blocking function without holding up the event loop, in a thread of its own.

    `num_threads` of the callers with the same number run at a time; one that is given up on no longer
    counts, though its thread ends only when it ends.
    """
    async with _slots(num_threads):
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def body() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = fn(*args), None
            except BaseException as error:
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(_settle, future, *outcome)

        threading.Thread(target=body, name="slime-hook", daemon=True).start()
        with _no_exits():
            return await future


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # which no future takes
        future.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        future.set_exception(error)


async def _without_exits(call: Coroutine[Any, Any, T]) -> T:
    with _no_exits():
        return await call


@contextlib.contextmanager
def _no_exits() -> Iterator[None]:
    """Either of these, leaving a task, ends the loop that runs it."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise HookEndedError(f"{type(error).__name__}: {error}") from error


async def _end(task: asyncio.Task[Any], what: str) -> None:
    task.cancel()
    if not task.done():
        await asyncio.wait([task], timeout=_CANCEL_S)
    if not task.done():
        logger.warning("%s was cancelled and goes on; it is left to itself", what)


def _place(coroutine: Any) -> str:
    """The innermost place that can be seen from outside, asyncio's own functions left out."""
    frame = None
    while coroutine is not None:
        inner = getattr(coroutine, "cr_frame", None)
        if inner is not None and _ASYNCIO not in inner.f_code.co_filename:
            frame = inner
        coroutine = getattr(coroutine, "cr_await", None)
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()
)


def _slots(count: int) -> asyncio.Semaphore:
    slots = _by_loop.setdefault(asyncio.get_running_loop(), {})
    if count not in slots:
        slots[count] = asyncio.Semaphore(count)
    return slots[count]
