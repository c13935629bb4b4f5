"""A small blocking JSON client for engines: key, deadline, retries while nobody listens yet.

`post_json` and its like make one call each. `JsonServer` is for many calls to one server: it keeps a
connection open between them, and the answer to a call may be read later than the call is sent.
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

_CORK: int | None = getattr(socket, "TCP_CORK", None)  # Linux has it
_RETRY_PAUSE = 0.2
_FRESH_S = 1.0  # servers close connections that were idle for 5 s and more
_STALL_S = 30.0  # a server that stops for so long amid a request or an answer is frozen


class HttpError(RuntimeError):
    """A call that failed; the text names the URL. `status` is None when there was no answer."""

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
    """The parsed reply (its text where it is not JSON); HttpError unless the status is 2xx."""
    return _call_once("POST", url, payload, token, timeout, retries)


def get_json(url: str, *, token: str | None = None, timeout: float = 60.0, retries: int = 3) -> Any:
    return _call_once("GET", url, None, token, timeout, retries)


def delete_json(url: str, *, token: str | None = None, timeout: float = 60.0) -> Any:
    return _call_once("DELETE", url, None, token, timeout, retries=3)


class JsonServer:
    """A server that is called many times; calls at the same time have a connection each.

    A connection is used again only soon after its last answer and if the server has not closed it: a
    request that is lost on the way is never repeated, since it may have been carried out.
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
        """Send a request, whose answer is to be had by `result()`."""
        deadline = time.monotonic() + timeout
        url = self._url + route
        connection = self._fresh() or _connect(method, url, deadline, retries)
        call = Call(
            method=method,
            url=url,
            timeout=timeout,
            deadline=deadline,
            connection=connection,
            answered=self._keep,
        )
        call.send(payload, self._token)
        return call

    def close(self) -> None:
        """Drop the connections that wait for a call; later calls open new ones."""
        while self._idle:
            self._idle.pop()[1].close()

    def _fresh(self) -> http.client.HTTPConnection | None:
        while self._idle:
            since, connection = self._idle.pop()
            alive = connection.sock is not None and not _readable(connection)
            if alive and time.monotonic() - since < _FRESH_S:
                return connection
            connection.close()
        return None

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        self._idle.append((time.monotonic(), connection))


@dataclass(kw_only=True)
class Call:
    """A request on its way and the connection on which its answer comes."""

    method: str
    url: str
    timeout: float
    deadline: float
    connection: http.client.HTTPConnection
    answered: Callable[[http.client.HTTPConnection], None]  # takes the connection after the answer

    def send(self, payload: dict[str, Any] | None, token: str | None) -> None:
        body = None if payload is None else orjson.dumps(payload)
        headers = key_headers(self.url)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._guarded(lambda: self._request(body, headers))

    def result(
        self, look_every_s: float = math.inf, look: Callable[[], None] = lambda: None
    ) -> Any:
        """The parsed answer; HttpError unless its status is 2xx.

        Meanwhile `look` is called every `look_every_s`; an HttpError of it ends the waiting.
        """
        status, text = self._guarded(lambda: self._read(look_every_s, look))
        self.answered(self.connection)
        if not 200 <= status < 300:
            raise HttpError(f"{self.method} {self.url}: status {status}: {text[:500]}", status)
        return _parse(text)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """The connection is of no more use after any failure."""
        try:
            return work()
        except TimeoutError as error:
            self.connection.close()
            message = f"{self.method} {self.url}: no answer within {self.timeout:g} s"
            raise HttpError(message) from error
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            # Not tried again: the request may have been carried out.
            message = f"{self.method} {self.url}: connection lost ({error!r})"
            raise HttpError(message) from error
        except BaseException:
            self.connection.close()
            raise

    def _request(self, body: bytes | None, headers: dict[str, str]) -> None:
        sock = self.connection.sock
        sock.settimeout(min(_remaining(self.deadline), _STALL_S))
        # Headers and body in one packet wake the server once.
        if _CORK is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _CORK, 1)
        self.connection.request(self.method, _target(self.url), body, headers)
        if _CORK is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _CORK, 0)

    def _read(self, look_every_s: float, look: Callable[[], None]) -> tuple[int, str]:
        sock = self.connection.sock
        response = self._response(look_every_s, look)
        chunks = [b""]
        while True:
            sock.settimeout(min(_remaining(self.deadline), _STALL_S))
            chunks.append(response.read1(1 << 20))
            if not chunks[-1]:
                break
        response.close()
        return response.status, b"".join(chunks).decode(errors="replace")

    def _response(self, look_every_s: float, look: Callable[[], None]) -> http.client.HTTPResponse:
        sock = self.connection.sock
        while True:
            sock.settimeout(min(_remaining(self.deadline), look_every_s))
            try:
                return self.connection.getresponse()
            except TimeoutError:  # nothing was read: it can be asked for again
                if time.monotonic() >= self.deadline:
                    raise
            try:
                look()
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
    server = JsonServer(url, token)
    try:
        return server.start(method, "", payload, timeout=timeout, retries=retries).result()
    finally:
        server.close()


def _connect(method: str, url: str, deadline: float, retries: int) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    for attempt in range(retries + 1):
        connection = kind(parts.netloc, timeout=_remaining(deadline))
        try:
            connection.connect()
            return connection
        except OSError as error:
            if attempt == retries or _remaining(deadline) < _RETRY_PAUSE:
                reason = error.strerror or repr(error)
                raise HttpError(f"{method} {url}: cannot connect ({reason})") from error
            time.sleep(_RETRY_PAUSE * 2**attempt)
    raise AssertionError("unreachable")


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _readable(connection: http.client.HTTPConnection) -> bool:
    """Whether an answer, or the end of the connection, has come."""
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
