"""Limits and checks of our HTTP servers, applied before a handler runs.

listener ─▶ GuardedServer: bounded number of connections; those without a complete request are closed
         ─▶ checks of the request's head: Host, Origin, key, media type
         ─▶ BodyReader: bounded size and time, for one request and for all together
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MIB = 2**20
_SPARE_FILES = 256  # file descriptors for everything that is not a connection
_LOG_EVERY_S = 10.0  # at most one line per kind of error
_WRITE_TIMEOUT_S = 600.0  # for a client to read a reply larger than the socket's buffer


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """A client's `keepalive_timeout` should be below `idle_s`: slime's own is 60 s."""

    head_s: float = 30.0  # from the connection to the end of its first request's head
    idle_s: float = 75.0  # from a reply to the end of the next request's head
    body_s: float = 60.0  # for a body, plus one second per MiB
    max_body: int = 64 * MIB
    max_bodies: int = 1024 * MIB  # of all requests being read
    max_connections: int = 8192


class Refused(Exception):
    """Raised to answer a request with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_browser(request: web.Request, bound_host: str, *, own_pages: bool = False) -> None:
    """Refuse requests that a web page can make a browser send to a local server.

    Browsers name the page in `Origin`; with `own_pages`, pages of this server are allowed. DNS rebinding
    makes a foreign name resolve to this machine; the name is in `Host`, where genuine requests to a
    server on loopback have a loopback name.
    """
    own = own_pages and request.headers.get("Origin") == f"http://{request.headers.get('Host')}"
    if "Origin" in request.headers and not own:
        raise Refused(403, "requests from web pages are refused: send no Origin header")
    hosts = request.headers.getall("Host", [])
    if _is_loopback(bound_host) and not all(_is_own_name(host, bound_host) for host in hosts):
        raise Refused(403, "this server only accepts localhost as Host header")


def has_key(request: web.Request, key: str) -> bool:
    """Return whether the request has `Authorization: Bearer <key>`."""
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, f"Bearer {key}".encode())


def check_media_type(request: web.Request) -> None:
    """Refuse a body that is compressed or not JSON."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(415, "compressed bodies are not supported: send no Content-Encoding")
    kind = request.content_type
    if request.body_exists and kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, "the body must be JSON: send Content-Type: application/json")


class BodyReader:
    """Reads bodies in bounded time, with a limit for each and for all that are being read."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._reserved = 0

    async def read(self, request: web.Request, max_body: int | None = None) -> bytes:
        if not request.body_exists:
            return b""
        limit = max_body or self._limits.max_body
        declared = request.content_length
        size = limit if declared is None else declared
        if size > limit:
            raise Refused(413, f"the body has {size} bytes; the limit is {limit}")
        if request.content.is_eof():  # arrived together with the head
            return await self._collect(request, limit)
        if self._reserved + size > max(self._limits.max_bodies, limit):
            raise Refused(503, "too many large requests at the same time: try again")
        self._reserved += size
        try:
            seconds = self._limits.body_s + size / MIB
            return await asyncio.wait_for(self._collect(request, limit), seconds)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not arrive within {seconds:.0f} s") from None
        finally:
            self._reserved -= size

    async def _collect(self, request: web.Request, limit: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.content.iter_any():
            size += len(chunk)
            if size > limit:
                raise Refused(413, f"the body has more than {limit} bytes, the limit")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class GuardedServer:
    """Serves an aiohttp application with a bounded number of connections.

    A connection is busy while a handler works on its request. An idle one is closed at its timeout, and
    when there are too many connections the one that has been idle longest is closed.
    """

    def __init__(
        self, app: web.Application, limits: HttpLimits, *, cancel_with_client: bool = True
    ) -> None:
        """With `cancel_with_client`, a handler is cancelled when its client disconnects."""
        app.middlewares.insert(0, self._note_busy)
        self._limits = limits
        self._runner = web.AppRunner(
            app,
            handler_cancellation=cancel_with_client,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.idle_s,
            lingering_time=2.0,
            shutdown_timeout=5.0,  # for handlers that wait for another process
            logger=_quiet_logger(),
        )
        self._most = limits.max_connections
        self._idle: dict[Any, float] = {}  # connection -> deadline for a request; oldest first
        self._busy: set[Any] = set()
        self._accepting: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        await self._runner.setup()
        self._most = min(self._most, _allow_files(self._most + _SPARE_FILES) - _SPARE_FILES)
        loop = asyncio.get_running_loop()
        self._accepting = await loop.create_server(self._accept, sock=listener, backlog=1024)
        self._sweeper = loop.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._accepting is not None:
            self._accepting.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        assert self._runner.server is not None
        if len(self._idle) + len(self._busy) >= self._most:
            self._forget_closed()
        if len(self._idle) + len(self._busy) >= self._most:
            if not self._idle:
                return _ClosedAtOnce()
            self._close(next(iter(self._idle)))
        connection = self._runner.server()
        self._idle[connection] = time.monotonic() + self._limits.head_s
        return connection

    @web.middleware
    async def _note_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        self._idle.pop(connection, None)
        self._busy.add(connection)
        try:
            return await handler(request)
        finally:
            self._busy.discard(connection)
            if connection.transport is not None:
                self._idle[connection] = time.monotonic() + self._limits.idle_s

    async def _sweep(self) -> None:
        pause_s = min(5.0, self._limits.head_s / 4, self._limits.idle_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            self._forget_closed()
            now = time.monotonic()
            for connection in [c for c, until in self._idle.items() if until <= now]:
                self._close_expired(connection, now)

    def _close_expired(self, connection: Any, now: float) -> None:
        writing = connection.transport is not None and connection.transport.get_write_buffer_size()
        if not writing or self._idle[connection] + _WRITE_TIMEOUT_S <= now:
            self._close(connection)

    def _close(self, connection: Any) -> None:
        del self._idle[connection]
        if connection.transport is None:  # just accepted, connection_made comes later
            asyncio.get_running_loop().call_later(1.0, connection.force_close)
        else:
            connection.force_close()

    def _forget_closed(self) -> None:
        """Remove lost connections; like new ones for a moment, they have no transport."""
        accepted_lately = time.monotonic() + self._limits.head_s - 1.0
        for connection in [
            c for c, until in self._idle.items() if c.transport is None and until < accepted_lately
        ]:
            del self._idle[connection]


class _ClosedAtOnce(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _QuietFilter(logging.Filter):
    """Rate limit: one line per kind of client error, and one traceback per kind of our own."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, tuple[float, int]] = {}  # kind -> (last log time, suppressed)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        kind = type(error).__name__
        logged, suppressed = self._last.get(kind, (-_LOG_EVERY_S, 0))
        now = time.monotonic()
        if now - logged < _LOG_EVERY_S:
            self._last[kind] = logged, suppressed + 1
            return False
        self._last[kind] = now, 0
        if isinstance(error, HttpProcessingError | ConnectionError | web.RequestPayloadError):
            reason = repr(str(error).partition("\n")[0][:200])
            record.msg, record.args = f"malformed request ({kind}): {reason}", ()
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        if suppressed:
            record.msg = f"{record.msg} [{suppressed} more like it were not logged]"
        return True


def _quiet_logger() -> logging.Logger:
    logger = logging.getLogger("slime.http_server")
    if not logger.filters:
        logger.addFilter(_QuietFilter())
    return logger


def _allow_files(wanted: int) -> int:
    """Raise the soft limit of open files towards `wanted`; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return max(soft, 2 * _SPARE_FILES)


@lru_cache(maxsize=256)
def _is_own_name(host: str, bound_host: str) -> bool:
    name = host.rpartition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
    return name.lower() in ("localhost", bound_host.lower()) or _is_loopback(name)


@lru_cache(maxsize=256)
def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
