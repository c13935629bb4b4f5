"""A small blocking JSON client for engines: token, deadline, retries while nobody listens yet."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

_RETRY_PAUSE = 0.2


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
    return _call("POST", url, json.dumps(payload).encode(), token, timeout, retries)


def get_json(url: str, *, token: str | None = None, timeout: float = 60.0, retries: int = 3) -> Any:
    return _call("GET", url, None, token, timeout, retries)


def delete_json(url: str, *, token: str | None = None, timeout: float = 60.0) -> Any:
    return _call("DELETE", url, None, token, timeout, retries=3)


def _call(
    method: str, url: str, body: bytes | None, token: str | None, timeout: float, retries: int
) -> Any:
    deadline = time.monotonic() + timeout
    connection = _connect(method, url, deadline, retries)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, _target(url), body, headers)
        status, text = _read(connection, deadline)
    except TimeoutError as error:
        raise HttpError(f"{method} {url}: no answer within {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        # Not tried again: the request may have been carried out.
        raise HttpError(f"{method} {url}: connection lost ({error!r})") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise HttpError(f"{method} {url}: status {status}: {text[:500]}", status)
    return _parse(text)


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


def _read(connection: http.client.HTTPConnection, deadline: float) -> tuple[int, str]:
    sock = connection.sock
    sock.settimeout(_remaining(deadline))
    response = connection.getresponse()
    chunks = []
    while chunk := response.read1(1 << 20):
        chunks.append(chunk)
        sock.settimeout(_remaining(deadline))
    return response.status, b"".join(chunks).decode(errors="replace")


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
