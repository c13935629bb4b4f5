"""Run user hooks so that a misbehaving one fails its own sample and nothing else.

A hook may block, never return, call `sys.exit`, raise a BaseException, or ignore cancellation. `run_hook`
awaits it in a task of its own, with a timeout. Blocking functions run in threads (`in_thread`) and async
rewards on a second event loop (`on_hook_loop`), so they can delay each other but never the generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from slime.utils.http import background_loop
from slime.utils.load_function import is_async

T = TypeVar("T")
logger = logging.getLogger(__name__)

_HOOK_LOOP = "slime-rewards"  # name of the second event loop and of its thread
NUM_THREADS = 32
_CANCEL_TIMEOUT_S = 5.0
_PYTHON_FOLDER = str(Path(asyncio.__file__).parents[1])
_OWN_FOLDER = str(Path(__file__).parents[1])


class HookEndedError(Exception):
    """The hook raised something that is not an Exception, such as SystemExit."""


@dataclass(kw_only=True, frozen=True)
class HookCall:
    """A hook that is running."""

    name: str  # e.g. "--custom-rm-path my.judge"
    started: float  # time.monotonic()
    location: str  # the line it is at: "judge.py:12 in score"


class HookCalls:
    """The hooks that one rollout is running; may be read from any thread."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], tuple[str, float, Coroutine[Any, Any, Any]]] = {}

    @contextlib.contextmanager
    def track(
        self, task: asyncio.Task[Any], name: str, call: Coroutine[Any, Any, Any]
    ) -> Iterator[None]:
        self._running[task] = (name, time.monotonic(), call)
        try:
            yield
        finally:
            del self._running[task]

    def running(self) -> list[HookCall]:
        """Return the running calls, the longest running first."""
        calls = sorted(self._running.values(), key=lambda entry: entry[1])
        return [
            HookCall(name=name, started=started, location=_location(call))
            for name, started, call in calls
        ]


@dataclass(kw_only=True)
class HookQueue:
    """Calls that wait for the same threads or the same event loop."""

    last_end: float = 0.0  # time.monotonic() when one of them last ended


class HookTimer:
    """The time charged against a hook's timeout.

    Time spent waiting in the queue counts half, measured from the last completion in the queue. Many slow
    calls one after another therefore do not time out the last one. A call that never ends does time out,
    and does so before the calls that wait behind it.
    """

    def __init__(self, queue: HookQueue | None = None) -> None:
        """Without a queue the hook starts immediately."""
        self._queue = queue or HookQueue()
        self._since, self._running = time.monotonic(), queue is None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the hook itself, which starts now."""
        self._since, self._running = time.monotonic(), True
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Record that the hook ended or is no longer waited for."""
        if self._running:
            self._queue.last_end = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        now = time.monotonic()
        if self._running:
            return now - self._since
        return (now - max(self._since, self._queue.last_end)) / 2


async def run_hook(
    call: Coroutine[Any, Any, T],
    *,
    name: str,
    timeout_s: float,
    timer: HookTimer | None = None,
    calls: HookCalls | None = None,
) -> T:
    """Await a hook in a task of its own: return its result or raise an Exception, never anything else.

    SystemExit would end the event loop, and a cancellation that the hook caused itself would look like
    one of the caller. While it runs the hook is listed in `calls`.
    """
    timer = timer or HookTimer()
    task = asyncio.get_running_loop().create_task(_catch_exits(call))
    with (calls or HookCalls()).track(task, name, call):
        try:
            while not task.done():
                if timer.elapsed_s >= timeout_s:
                    timer.stop()
                    raise TimeoutError(f"{name} took longer than {timeout_s:.0f} s")
                await asyncio.wait([task], timeout=max(timeout_s - timer.elapsed_s, 0.01))
        finally:
            await _cancel(task, name)
            if task.done():
                call.close()  # in case it was cancelled before it had started
    if task.cancelled():
        raise HookEndedError("CancelledError: it cancelled itself")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise HookEndedError(f"{type(error).__name__}: {error}") from error
    return task.result()


async def call_function(
    fn: Callable[..., Any],
    *args: Any,
    name: str,
    kind: str,
    timeout_s: float,
    calls: HookCalls | None = None,
    num_threads: int = NUM_THREADS,
) -> Any:
    """Call a user's function by `run_hook`: an async one on the second event loop, others in a thread.

    A slow or blocking function delays only calls of the same `kind`, never the generation.
    """
    queue_name = f"{'async' if is_async(fn) else 'plain'} {kind}"
    timer = HookTimer(_loop_state().queues.setdefault(queue_name, HookQueue()))

    def timed() -> Any:
        with timer.running():
            return fn(*args)

    async def timed_await(result: Awaitable[Any]) -> Any:
        with timer.running():
            return await result

    async def call() -> Any:
        if is_async(fn):
            return await on_hook_loop(timed_await(fn(*args)))
        result = await in_thread(timed, num_threads=num_threads)
        return await on_hook_loop(timed_await(result)) if inspect.isawaitable(result) else result

    return await run_hook(call(), name=name, timeout_s=timeout_s, timer=timer, calls=calls)


async def on_hook_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a hook on the second event loop, which it may block without delaying generation."""
    loop = background_loop(_HOOK_LOOP)
    if loop is asyncio.get_running_loop():
        return await coroutine
    future = asyncio.run_coroutine_threadsafe(_catch_exits(coroutine), loop)
    return await asyncio.wrap_future(future)


async def on_main_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a request to an engine on the main event loop, also when called from the second one."""
    if threading.current_thread().name != _HOOK_LOOP:
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, background_loop()))


async def in_thread(fn: Callable[..., T], *args: Any, num_threads: int = NUM_THREADS) -> T:
    """Run a blocking function in a thread of its own, which inherits the context variables.

    Callers with the same `num_threads` share that many threads. A call that was cancelled frees its slot,
    although its thread ends only when the function returns.
    """
    async with call_slots(num_threads):
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def body() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = fn(*args), None
            except BaseException as error:
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is exiting
                loop.call_soon_threadsafe(_resolve, future, *outcome)

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(body,), name="slime-hook", daemon=True)
        thread.start()
        return await _catch_exits(future)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future does not accept it
        future.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        future.set_exception(error)


async def _catch_exits(call: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await the call; SystemExit and KeyboardInterrupt would otherwise end the event loop."""
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:
        raise HookEndedError(f"{type(error).__name__}: {error}") from error


async def _cancel(task: asyncio.Task[Any], name: str) -> None:
    task.cancel()
    if not task.done():
        await asyncio.wait([task], timeout=_CANCEL_TIMEOUT_S)
    if not task.done():
        logger.warning("%s was cancelled but is still running; it is no longer waited for", name)


def _location(coroutine: Any) -> str:
    """Return the line that a call is at: the innermost one of the user's own code, if there is one."""
    frames = list(_frames(coroutine))
    outside = [frame for frame in frames if not _is_library(frame.f_code.co_filename)]
    own = [frame for frame in outside if not frame.f_code.co_filename.startswith(_OWN_FOLDER)]
    if not frames:
        return "an unknown line"
    frame = (own or outside or frames)[-1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a call, the outermost first, including those in a thread or on the second loop."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        inner = getattr(coroutine, "cr_await", None)
        if frame is not None:
            yield frame
            if frame.f_code is on_hook_loop.__code__:
                inner = frame.f_locals.get("coroutine")
            elif frame.f_code is in_thread.__code__ and "thread" in frame.f_locals:
                yield from _thread_frames(frame.f_locals["thread"])
        coroutine = inner


def _thread_frames(thread: threading.Thread) -> list[FrameType]:
    frame, found = sys._current_frames().get(thread.ident or 0), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _is_library(file: str) -> bool:
    packages = ("/site-packages/", "/dist-packages/", "<")
    return file.startswith(_PYTHON_FOLDER) or any(part in file for part in packages)


@dataclass(kw_only=True)
class _LoopState:
    slots: dict[tuple[str, int], asyncio.Semaphore] = field(default_factory=dict)
    queues: dict[str, HookQueue] = field(default_factory=dict)


# Semaphores belong to one event loop.
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = (
    weakref.WeakKeyDictionary()
)


def _loop_state() -> _LoopState:
    return _by_loop.setdefault(asyncio.get_running_loop(), _LoopState())


def call_slots(count: int, kind: str = "thread") -> asyncio.Semaphore:
    """Return the semaphore that lets `count` calls of a kind run at a time in this event loop."""
    return _loop_state().slots.setdefault((kind, count), asyncio.Semaphore(count))
