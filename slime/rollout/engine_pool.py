"""The engines that a process generates with: load balancing, bounded concurrency, retries on other engines.

pool.generate(payload) ─▶ wait for a free slot ─▶ least loaded engine ─▶ POST /generate
                                                    │ unreachable: back off, try another
                                                    └ no engine answers until the deadline: error
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from typing import Any

import aiohttp

from slime.core.errors import UserError
from slime.utils.engine_keys import remember_key
from slime.utils.http import HttpStatusError, is_temporary, post_once

logger = logging.getLogger(__name__)

_MAX_SESSIONS = 65536
SESSION_HEADER = "X-SMG-Routing-Key"  # sglang-router's, for its policy "manual"
_SESSION_SLACK = 8  # requests a session's engine may be ahead of the least loaded one
_BACKOFF_S = (0.2, 10.0)  # first and longest pause of an engine that did not answer


class EngineUnreachableError(UserError):
    """No engine answered within the deadline."""


class EngineRefusedError(Exception):
    """An engine rejected the request; a retry would not help."""


class EnginePool:
    """Must be used from one event loop; `set_urls` may be called from any thread."""

    def __init__(
        self,
        urls: list[str],
        token: str | None = None,
        concurrency: int = 512,
        *,
        deadline_s: float = 1800.0,
        request_timeout_s: float = 7200.0,
        adapter: str | None = None,
    ) -> None:
        """`deadline_s` (--rollout-no-engine-timeout): how long a request is retried while no engine answers.

        `adapter` is the LoRA adapter of requests that name none.
        """
        self._adapter = adapter
        self.concurrency = concurrency
        self.deadline_s = deadline_s
        self.request_timeout_s = request_timeout_s
        self._token = token
        remember_key(urls, token)
        self._engines = list(urls)
        self._urls = list(urls)  # where requests go: the engines, or a router in front of them
        self._in_flight: dict[str, int] = dict.fromkeys(urls, 0)
        self._backoff: dict[str, tuple[float, float]] = {}  # url -> (until, length of this pause)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._calls: dict[asyncio.Task[Any], str] = {}
        # Calls that were cancelled because their engine was removed.
        self._lost: set[asyncio.Task[Any]] = set()
        self._next = 0  # index of `next_url`
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def urls(self) -> list[str]:
        return list(self._engines)

    def next_url(self) -> str:
        """Return an address to send a request to: the router's, or the engines' in turn.

        Raise ConnectionError while no engine is up: the sample of the hook fails, and the run continues.
        """
        urls = self._urls
        if not urls:
            raise ConnectionError(
                "no engine of this model is up; `generate` of its pool waits for one"
            )
        self._next += 1
        return urls[self._next % len(urls)]

    @property
    def in_flight(self) -> dict[str, int]:
        """Return the number of running requests by engine, or of those sent to the router."""
        return {url: self._in_flight.get(url, 0) for url in self._urls}

    def set_urls(self, engines: list[str], router: str | None = None) -> None:
        """Replace the engines; running requests of a removed one are sent again to another.

        A router does so itself when it loses the connection.
        """
        urls = [router] if router is not None and engines else engines
        remember_key({*urls, *engines}, self._token)
        self._engines = list(engines)
        removed = set(self._urls) - set(urls)
        for url in urls:
            self._in_flight.setdefault(url, 0)
        self._urls = list(urls)
        backoff = self._backoff.copy()  # the event loop may change it concurrently
        self._backoff = {url: pause for url, pause in backoff.items() if url in self._urls}
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._engines_changed, removed)

    async def generate(
        self, payload: dict[str, Any], session_id: str | None = None
    ) -> dict[str, Any]:
        """POST /generate on one engine. Requests of one `session_id` go to the same engine for its prefix cache."""
        self._loop = asyncio.get_running_loop()
        if self._adapter is not None:
            payload = {"lora_path": self._adapter, **payload}
        failed_at: float | None = None
        # Without an engine that works on it: long attempts count only if they are retries that time out.
        failing_s = 0.0
        while True:
            url = await self._acquire(session_id)
            begun = time.monotonic()
            failing_s += 0.0 if failed_at is None else begun - failed_at
            call = self._loop.create_task(
                post_once(
                    f"{url}/generate",
                    payload,
                    timeout_s=self.request_timeout_s,
                    headers={SESSION_HEADER: session_id} if session_id else None,
                )
            )
            self._calls[call] = url
            try:
                reply = await call
                self._backoff.pop(url, None)
                return reply
            except asyncio.CancelledError:
                if call not in self._lost:
                    raise
                self._lost.discard(call)
                failed_at = None if failed_at is None else time.monotonic()  # it worked until now
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, HttpStatusError) as error:
                if not is_temporary(error):
                    raise EngineRefusedError(_with_advice(str(error))) from error
                self._back_off(url, error)
                if failed_at is not None and isinstance(error, asyncio.TimeoutError):
                    failing_s += time.monotonic() - begun
                failed_at = time.monotonic()
                self._raise_after_deadline(failing_s, url, error)
            finally:
                del self._calls[call]
                self._in_flight[url] -= 1
                self._wake(1)

    async def abort_all(self) -> None:
        """Abort all requests of every engine; they return the tokens generated so far."""
        engines = list(self._engines)
        results = await asyncio.gather(
            *(
                post_once(f"{url}/abort_request", {"abort_all": True}, timeout_s=10)
                for url in engines
            ),
            return_exceptions=True,
        )
        for url, result in zip(engines, results, strict=True):
            if isinstance(result, Exception):
                logger.warning("abort on engine %s failed: %s", url, result)

    @property
    def _limit(self) -> int:
        """Return how many requests one address may have; a router has the slots of all engines."""
        return self.concurrency * (1 if self._urls == self._engines else len(self._engines))

    async def _acquire(self, session_id: str | None) -> str:
        """Take a slot on an engine; wait while all are full or in backoff."""
        empty_since: float | None = None
        while (url := self._choose(session_id)) is None:
            timeout = None
            if not self._urls:
                empty_since = empty_since or time.monotonic()
                timeout = empty_since + self.deadline_s - time.monotonic()
                if timeout <= 0:
                    raise EngineUnreachableError(
                        f"no engine was available for {self.deadline_s:.0f} s"
                    )
            await self._wait_for_change(timeout)
        self._in_flight[url] += 1
        return url

    async def _wait_for_change(self, timeout: float | None) -> None:
        """Wait until a slot is free, an engine's backoff is over, or the engines have changed."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout)
        except asyncio.CancelledError:
            if waiter.done():  # pass on a slot that it will not take
                self._wake(1)
            raise
        finally:
            waiter.cancel()  # no effect if it was woken; else `_wake` skips it

    def _choose(self, session_id: str | None) -> str | None:
        now = time.monotonic()
        free = [
            url
            for url in self._urls
            if self._in_flight[url] < self._limit and self._backoff.get(url, (0.0, 0.0))[0] <= now
        ]
        if not free:
            return None
        best = min(free, key=lambda url: self._in_flight[url])
        if session_id is None:
            return best
        previous = self._sessions.get(session_id)
        if previous in free and self._in_flight[previous] <= self._in_flight[best] + _SESSION_SLACK:
            best = previous
        self._sessions[session_id] = best
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return best

    def _wake(self, count: int) -> None:
        while self._waiters and count:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _engines_changed(self, removed: set[str]) -> None:
        for call, url in self._calls.items():
            if url in removed and not call.done():
                self._lost.add(call)
                call.cancel()
        self._wake(len(self._waiters))

    def _back_off(self, url: str, error: Exception) -> None:
        """Pause the engine, twice as long as last time; requests that fail together count as one failure."""
        until, length = self._backoff.get(url, (0.0, 0.0))
        now = time.monotonic()
        if until > now:
            return
        length = min(max(2 * length, _BACKOFF_S[0]), _BACKOFF_S[1])
        self._backoff[url] = (now + length, length)
        asyncio.get_running_loop().call_later(length, lambda: self._wake(len(self._waiters)))
        logger.warning("engine %s: %s; retrying in %.1f s", url, str(error) or repr(error), length)

    def _raise_after_deadline(self, failing_s: float, url: str, error: Exception) -> None:
        if failing_s > self.deadline_s:
            raise EngineUnreachableError(
                f"no engine answered for {self.deadline_s:.0f} s; the last one tried, {url}, failed "
                f"with: {str(error) or repr(error)}. Engines: {', '.join(self._engines)}. "
                "Their logs are in the run folder under logs/"
            ) from error


def _with_advice(answer: str) -> str:
    if "context length" not in answer:
        return answer
    return (
        f"{answer} --rollout-max-prompt-len removes long prompts from the data, "
        "--rollout-max-context-len ends responses at the context length"
    )
