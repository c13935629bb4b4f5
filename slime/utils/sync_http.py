"""JSON over HTTP for synchronous callers: API key, deadline, retries while no server listens yet.

`post_json`, `get_json` and `delete_json` make one call each. `JsonClient` makes many calls to one server over
kept-alive connections; `start` sends a request and `Call.result` reads its reply, so that several can be
under way without a thread. Coroutines use `slime.utils.http`. This client uses plain sockets because a call
through aiohttp's loop in another thread made a weight update 1.2 times as long (docs/LOG.md).
"""

from __future__ import annotations

import http.client
import json
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from slime.utils.engine_keys import key_headers

_CORK: int | None = getattr(socket, "TCP_CORK", None)  # Linux only
_RETRY_PAUSE_S = 0.2
_KEEP_ALIVE_S = 1.0  # servers close connections that were idle for 5 s and more
_STALL_TIMEOUT_S = 30.0  # without progress inside a request or a reply: the server is frozen


class HttpError(RuntimeError):
    """A call that failed; the message names the URL. `status` is None when there was no reply."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def post_json(
    url: str,
    payload: dict[str, Any],
    *,
    token: str | None = None,
    timeout: float = 60.0,
    retries: int = 3,
) -> Any:
    """Return the parsed reply (its text if it is not JSON); raise HttpError unless the status is 2xx."""
    return _call_once("POST", url, payload, token, timeout, retries)


def get_json(url: str, *, token: str | None = None, timeout: float = 60.0, retries: int = 3) -> Any:
    return _call_once("GET", url, None, token, timeout, retries)


def delete_json(url: str, *, timeout: float) -> Any:
    return _call_once("DELETE", url, None, None, timeout, retries=3)


class JsonClient:
    """Calls one server many times; calls that overlap have a connection each.

    A connection is reused only shortly after its last reply and if the server has not closed it. A
    request that was sent is never repeated, since the server may have executed it.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url, self._token = url, token
        self._idle: deque[tuple[float, http.client.HTTPConnection]] = deque()

    def start(
        self,
        method: str,
        route: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout: float = 60.0,
        retries: int = 3,
    ) -> Call:
        """Send a request; `Call.result()` waits for its reply."""
        deadline = time.monotonic() + timeout
        url = self._url + route
        connection = self._reusable() or _connect(method, url, deadline, retries)
        call = Call(
            method=method,
            url=url,
            timeout=timeout,
            deadline=deadline,
            connection=connection,
            release=self._release,
        )
        call.send(payload, self._token)
        return call

    def close(self) -> None:
        """Close the idle connections; later calls open new ones."""
        while self._idle:
            self._idle.pop()[1].close()

    def _reusable(self) -> http.client.HTTPConnection | None:
        while self._idle:
            since, connection = self._idle.pop()
            alive = connection.sock is not None and not _readable(connection)
            if alive and time.monotonic() - since < _KEEP_ALIVE_S:
                return connection
            connection.close()
        return None

    def _release(self, connection: http.client.HTTPConnection) -> None:
        self._idle.append((time.monotonic(), connection))


@dataclass(kw_only=True)
class Call:
    """A request that is under way, and the connection its reply arrives on."""

    method: str
    url: str
    timeout: float
    deadline: float
    connection: http.client.HTTPConnection
    release: Callable[[http.client.HTTPConnection], None]  # takes the connection after the reply

    def send(self, payload: dict[str, Any] | None, token: str | None) -> None:
        body = None if payload is None else orjson.dumps(payload)
        headers = key_headers(self.url)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._guarded(lambda: self._request(body, headers))

    def result(
        self, probe_every_s: float = math.inf, probe: Callable[[], None] = lambda: None
    ) -> Any:
        """Return the parsed reply; raise HttpError unless its status is 2xx.

        `probe` is called every `probe_every_s` seconds without a reply; an HttpError from it ends the wait.
        """
        status, text = self._guarded(lambda: self._read(probe_every_s, probe))
        self.release(self.connection)
        if not 200 <= status < 300:
            raise HttpError(f"{self.method} {self.url}: status {status}: {text[:500]}", status)
        return _parse(text)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Run `work`; close the connection after any failure and raise network errors as HttpError."""
        try:
            return work()
        except TimeoutError as error:
            self.connection.close()
            message = f"{self.method} {self.url}: no answer within {self.timeout:g} s"
            raise HttpError(message) from error
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            message = f"{self.method} {self.url}: connection lost ({error!r})"
            raise HttpError(message) from error
        except BaseException:
            self.connection.close()
            raise

    def _request(self, body: bytes | None, headers: dict[str, str]) -> None:
        sock = self.connection.sock
        sock.settimeout(min(_remaining(self.deadline), _STALL_TIMEOUT_S))
        # Headers and body in one packet wake the server once.
        if _CORK is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _CORK, 1)
        self.connection.request(self.method, _target(self.url), body, headers)
        if _CORK is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _CORK, 0)

    def _read(self, probe_every_s: float, probe: Callable[[], None]) -> tuple[int, str]:
        sock = self.connection.sock
        response = self._response(probe_every_s, probe)
        chunks = [b""]
        while True:
            sock.settimeout(min(_remaining(self.deadline), _STALL_TIMEOUT_S))
            chunks.append(response.read1(1 << 20))
            if not chunks[-1]:
                break
        response.close()
        return response.status, b"".join(chunks).decode(errors="replace")

    def _response(
        self, probe_every_s: float, probe: Callable[[], None]
    ) -> http.client.HTTPResponse:
        sock = self.connection.sock
        while True:
            sock.settimeout(min(_remaining(self.deadline), probe_every_s))
            try:
                return self.connection.getresponse()
            except TimeoutError:  # nothing was read, so getresponse can be called again
                if time.monotonic() >= self.deadline:
                    raise
            try:
                probe()
            except HttpError:
                if not _readable(self.connection):
                    raise


def _call_once(
    method: str,
    url: str,
    payload: dict[str, Any] | None,
    token: str | None,
    timeout: float,
    retries: int,
) -> Any:
    client = JsonClient(url, token)
    try:
        return client.start(method, "", payload, timeout=timeout, retries=retries).result()
    finally:
        client.close()


def _connect(method: str, url: str, deadline: float, retries: int) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    for attempt in range(retries + 1):
        connection = kind(parts.netloc, timeout=_remaining(deadline))
        try:
            connection.connect()
            return connection
        except OSError as error:
            if attempt == retries or _remaining(deadline) < _RETRY_PAUSE_S:
                reason = error.strerror or repr(error)
                raise HttpError(f"{method} {url}: cannot connect ({reason})") from error
            time.sleep(_RETRY_PAUSE_S * 2**attempt)
    raise AssertionError("unreachable")


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _readable(connection: http.client.HTTPConnection) -> bool:
    """Return whether a reply, or the end of the connection, has arrived."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
