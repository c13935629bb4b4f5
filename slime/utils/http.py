"""JSON over HTTP for coroutines, on one background event loop per process.

Synchronous callers use `slime.utils.sync_http`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import threading
import time
import weakref
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import aiohttp
import orjson

from slime.utils.engine_keys import key_headers
from slime.utils.sync_http import HttpError

T = TypeVar("T")

_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
    weakref.WeakKeyDictionary()
)
_loops: dict[str, asyncio.AbstractEventLoop] = {}  # by thread name
_loop_lock = threading.Lock()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for it; an interrupt cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, background_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def background_loop(name: str = "slime-http") -> asyncio.AbstractEventLoop:
    """Return the event loop that runs in a daemon thread of this name; start it at the first call."""
    with _loop_lock:
        loop = _loops.get(name)
        if loop is None or loop.is_closed():
            loop = _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
            atexit.register(_close, loop)
        return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    existing = _sessions.pop(loop, None)
    if existing is not None and loop.is_running():
        with contextlib.suppress(concurrent.futures.TimeoutError):  # a hook may block the loop
            asyncio.run_coroutine_threadsafe(existing.close(), loop).result(timeout=5)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; if one raises, cancel the others before raising its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def session() -> aiohttp.ClientSession:
    """Return the client session of the running loop; callers bound the number of connections."""
    loop = asyncio.get_running_loop()
    existing = _sessions.get(loop)
    if existing is None or existing.closed:
        existing = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        _sessions[loop] = existing
    return existing


class HttpStatusError(HttpError):
    """The server answered with a status other than 200."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}", status)
        self.status: int = status
        self.message = message


async def post_once(
    url: str,
    payload: Any,
    *,
    timeout_s: float | None = None,
    headers: dict[str, str] | None = None,
) -> Any:
    """POST JSON and return the parsed reply (None if it is empty); HttpStatusError unless it is a 200.

    Requests to an engine of the run carry the run's key.
    """
    async with session().post(
        url,
        data=_as_json(payload),
        headers={"Content-Type": "application/json", **key_headers(url), **(headers or {})},
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10),
    ) as response:
        body = await response.read()
        if response.status != 200:
            raise HttpStatusError(url, response.status, _error_text(body))
        return _parse(url, body) if body else None


def _as_json(payload: Any) -> bytes:
    try:
        return orjson.dumps(payload)
    except TypeError:  # integers above 64 bits
        return json.dumps(payload).encode()


async def post(
    url: str,
    payload: Any,
    *,
    deadline_s: float = 300.0,
    headers: dict[str, str] | None = None,
    slots: asyncio.Semaphore | None = None,
) -> Any:
    """POST JSON, retrying with exponential backoff (0.25 s to 15 s) until `deadline_s` has passed.

    A refused request (4xx except 408 and 429) is not retried. Each attempt takes one of `slots`; waiting
    for it is not part of the deadline.
    """
    end = time.monotonic() + deadline_s
    wait_s = 0.25
    while True:
        asked = time.monotonic()
        try:
            async with slots or contextlib.nullcontext():
                end += (begun := time.monotonic()) - asked
                timeout_s = max(end - begun, 0.1)
                return await post_once(url, payload, timeout_s=timeout_s, headers=headers)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, HttpStatusError) as error:
            if time.monotonic() + wait_s > end and isinstance(error, asyncio.TimeoutError):
                raise TimeoutError(f"{url} gave no answer in {deadline_s:.0f} s") from error
            if not is_temporary(error) or time.monotonic() + wait_s > end:
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, 15.0)


def is_temporary(error: Exception) -> bool:
    """Return whether a retry may succeed: no connection, timeouts, overload, server errors."""
    if isinstance(error, HttpStatusError):
        return error.status >= 500 or error.status in (408, 429)
    return isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, OSError))


def _parse(url: str, body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        start = body[:100].decode(errors="replace")
        raise ValueError(
            f"{url} answered with something that is not JSON ({error}): {start!r}"
        ) from None


def _error_text(body: bytes) -> str:
    """Return the message in the JSON that servers use for errors, else the start of the text."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode(errors="replace")
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return str(error)[:500]
