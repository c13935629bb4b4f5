"""Between the engine's thread and the HTTP event loop: who waits for which request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from slime.engine.scheduler.request import Request
from slime.utils.http_guard import Refused

if TYPE_CHECKING:
    from slime.engine.engine import Engine


_MOST_IN_FLIGHT = 1 << 16


class ReplyHub:
    """Requests are waited for in the event loop; updates come from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: dict[Request, asyncio.Queue[Request]] = {}
        self.engine: Engine | None = None

    def on_update(self, requests: list[Request]) -> None:
        """Called in the engine's thread; one wake-up of the loop for a whole step."""
        self._loop.call_soon_threadsafe(self._deliver, requests)

    def require_room(self, count: int) -> None:
        """Refuse requests beyond those that may be in flight; a client may try again."""
        assert self.engine is not None
        if self.engine.in_flight + count > _MOST_IN_FLIGHT:
            raise Refused(503, f"{self.engine.in_flight} requests are in flight: try again later")

    async def run(self, requests: list[Request]) -> None:
        """Until all of them are finished; if the caller goes away they are aborted."""
        async for _ in self.stream(requests):
            pass

    async def stream(self, requests: list[Request]) -> AsyncIterator[Request]:
        """Each request whenever it has news; a request's last appearance is finished."""
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
                engine, left = self.engine, frozenset(unfinished)
                engine.call(lambda: engine.abort(lambda request: request in left))

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            queue = self._waiters.get(request)
            if queue is not None:
                queue.put_nowait(request)
