"""Bridges between the event loop and threads: updates from the engine thread, expensive work on daemon threads."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from slime.engine.scheduler.request import Request
from slime.utils.http_guard import Refused

if TYPE_CHECKING:
    from slime.engine.engine import Engine

T = TypeVar("T")
_MAX_IN_FLIGHT = 1 << 16
_MAX_WAITING = 512
_TIMEOUT_S = 30.0


class ReplyHub:
    """HTTP handlers await requests in the event loop; updates arrive from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: dict[Request, asyncio.Queue[Request]] = {}
        self.engine: Engine | None = None

    def on_update(self, requests: list[Request]) -> None:
        """Deliver updates; called in the engine's thread, with one wake-up of the event loop per step."""
        self._loop.call_soon_threadsafe(self._deliver, requests)

    def check_capacity(self, count: int) -> None:
        """Raise Refused (503) if these requests exceed the maximum number in flight."""
        assert self.engine is not None
        if self.engine.in_flight + count > _MAX_IN_FLIGHT:
            raise Refused(503, f"{self.engine.in_flight} requests are in flight: try again later")

    async def run(self, requests: list[Request]) -> None:
        """Wait until all requests are finished; abort them if the caller is cancelled."""
        async for _ in self.stream(requests):
            pass

    async def stream(self, requests: list[Request]) -> AsyncIterator[Request]:
        """Yield a request on each update; the last time it is yielded, it is finished."""
        assert self.engine is not None
        queue: asyncio.Queue[Request] = asyncio.Queue()
        for request in requests:
            self._waiters[request] = queue
        self.engine.submit(requests)
        unfinished = set(requests)
        try:
            while unfinished:
                request = await queue.get()
                if request not in unfinished:
                    continue
                if request.finish is not None:
                    unfinished.discard(request)
                yield request
        finally:
            for request in requests:
                self._waiters.pop(request, None)
            if unfinished:
                engine, pending = self.engine, frozenset(unfinished)
                engine.call(lambda: engine.abort(lambda request: request in pending))

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            queue = self._waiters.get(request)
            if queue is not None:
                queue.put_nowait(request)


class DaemonCall:
    """Run a function on its own daemon thread; `future` delivers the result to the calling event loop."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._thread = threading.Thread(target=self._work, args=(function,), daemon=True, name=name)
        self._thread.start()

    def interrupt(self) -> None:
        """Raise TimeoutError in the thread at its next Python bytecode."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeoutError))

    def _work(self, function: Callable[[], Any]) -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        try:
            self._send(result, error)
        except TimeoutError:  # interrupted while sending
            self._send(result, error)

    def _send(self, result: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class Workers:
    """A bounded thread pool for work whose cost clients control: rendering and tokenizing.

    At most `count` hostile texts are processed at a time, and the event loop keeps serving other clients.
    """

    def __init__(
        self, count: int = 2, *, max_waiting: int = _MAX_WAITING, seconds: float = _TIMEOUT_S
    ) -> None:
        self._slots = asyncio.Semaphore(count)
        self._waiting, self._max_waiting, self._seconds = 0, max_waiting, seconds

    async def run(self, function: Callable[[], T], *, interruptible: bool = False) -> T:
        """Return the function's result; raise Refused after the timeout or when the queue is full.

        On a timeout an interruptible function is interrupted. A function that runs in C continues and keeps
        its slot.
        """
        if self._waiting >= self._max_waiting:
            raise Refused(503, "too many texts are queued for tokenization: try again")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        call = DaemonCall(function, "text-worker")
        call.future.add_done_callback(lambda _: self._slots.release())
        done, _ = await asyncio.wait([call.future], timeout=self._seconds)
        if not done:
            if interruptible:
                call.interrupt()
            raise Refused(400, f"rendering or tokenizing the text took over {self._seconds:.0f} s")
        return call.future.result()
