"""Delivers updates of requests from the engine's thread to the HTTP handlers that await them."""

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
        if self.engine.in_flight + count > _MOST_IN_FLIGHT:
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
                engine, left = self.engine, frozenset(unfinished)
                engine.call(lambda: engine.abort(lambda request: request in left))

    def _deliver(self, requests: list[Request]) -> None:
        for request in requests:
            queue = self._waiters.get(request)
            if queue is not None:
                queue.put_nowait(request)
