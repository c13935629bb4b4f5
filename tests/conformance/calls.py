"""Requests the suite makes."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from slime.utils.sync_http import HttpError, post_json
from tests.conformance.conftest import Subject

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


def generate(subject: Subject, **body: Any) -> Any:
    return post_json(f"{subject.server.url}/generate", body, timeout=120)  # no token: it is open


def refusal(subject: Subject, **body: Any) -> str:
    with pytest.raises(HttpError) as error:
        generate(subject, **body)
    assert error.value.status == 400, error.value
    return str(error.value)


def control_refusal(subject: Subject, route: str, body: dict[str, Any]) -> str:
    with pytest.raises(HttpError) as error:
        subject.server.post(route, body)
    assert error.value.status == 400, error.value
    return str(error.value)


def flush(subject: Subject) -> None:
    """A server is idle a moment after its last reply."""
    wait_for(lambda: _flushed(subject))


def _flushed(subject: Subject) -> bool:
    try:
        subject.server.post("/flush_cache")
    except HttpError as error:
        assert error.status == 400
        return False
    return True


class Running:
    """A request under way; made once its first token is there."""

    def __init__(self, subject: Subject, **body: Any) -> None:
        begun: Future[None] = Future()
        self._reply: Future[Any] = Future()

        def read() -> None:
            try:
                self._reply.set_result(_last_chunk(subject, body, lambda: begun.set_result(None)))
            except Exception as error:
                self._reply.set_exception(error)
                if not begun.done():
                    begun.set_exception(error)

        threading.Thread(target=read, daemon=True).start()
        begun.result(timeout=60)

    def done(self) -> bool:
        return self._reply.done()

    def result(self) -> Any:
        return self._reply.result(timeout=120)


def _last_chunk(subject: Subject, body: dict[str, Any], on_first: Callable[[], None]) -> Any:
    """Chunks hold all there is so far, so the last one is the whole reply."""
    data = json.dumps({**body, "stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{subject.server.url}/generate", data, headers)
    last = None
    with urllib.request.urlopen(call, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                if last is None:
                    on_first()
                last = json.loads(line[6:])
    return last


def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
