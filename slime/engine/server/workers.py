"""Work beside the event loop, on daemon threads: none of them keeps the process from ending."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from slime.utils.http_guard import Refused

T = TypeVar("T")
_WAITING = 512
_SECONDS = 30.0


class DaemonCall:
    """A function running on a thread of its own; `future` has its result on the calling event loop."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._thread = threading.Thread(target=self._work, args=(function,), daemon=True, name=name)
        self._thread.start()

    def interrupt(self) -> None:
        """Raise TimeoutError in the thread, at its next step of Python."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeoutError))

    def _work(self, function: Callable[[], Any]) -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        try:
            self._hand_over(result, error)
        except TimeoutError:  # interrupted as late as here
            self._hand_over(result, error)

    def _hand_over(self, result: Any, error: BaseException | None) -> None:
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
    """A bounded number of threads for what clients can make expensive: rendering and tokenizing.

    Two hostile texts at most are worked on at a time, while the event loop answers everybody else.
    """

    def __init__(
        self, count: int = 2, *, max_waiting: int = _WAITING, seconds: float = _SECONDS
    ) -> None:
        self._slots = asyncio.Semaphore(count)
        self._waiting, self._max_waiting, self._seconds = 0, max_waiting, seconds

    async def run(self, function: Callable[[], T], *, interruptible: bool = False) -> T:
        """The function's result; Refused if it takes too long or too many wait.

        One that is interruptible is ended then. The others, in C, go on and keep their slot.
        """
        if self._waiting >= self._max_waiting:
            raise Refused(503, "too many texts wait to be tokenized: try again")
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
