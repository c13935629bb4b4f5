"""Requests the suite makes."""

from __future__ import annotations

import json
import secrets
import threading
import urllib.request
from concurrent.futures import Future
from typing import Any

import pytest

from slime.utils.engine_keys import key_headers
from slime.utils.sync_http import HttpError, post_json
from tests.conformance.conftest import Subject
from tests.waiting import wait_for

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def generate(subject: Subject, **body: Any) -> Any:
    return post_json(f"{subject.server.url}/generate", body, timeout=240)  # no token: it is open


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
    """A greedy request under way, as long as the model has room for; made once its first token is there,
    ended at the latest with the `with`."""

    def __init__(self, subject: Subject, ids: list[int], **body: Any) -> None:
        self.subject, self.rid = subject, secrets.token_hex(8)
        self.max_new_tokens = subject.context - 100
        self.num_tokens = 0  # so far
        self._reply: Future[Any] = Future()
        params = {"temperature": 0, "max_new_tokens": self.max_new_tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "rid": self.rid, **body}
        threading.Thread(target=self._read, args=(body,), daemon=True).start()
        self.wait_for_tokens(1)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    def abort(self) -> None:
        self.subject.server.post("/abort_request", {"rid": self.rid})

    def done(self) -> bool:
        return self._reply.done()

    def result(self) -> Any:
        return self._reply.result(timeout=240)

    def wait_for_tokens(self, count: int) -> None:
        """Until there are so many, or no more of them come."""
        wait_for(lambda: self.num_tokens >= count or self.done())

    def _read(self, body: dict[str, Any]) -> None:
        try:
            self._reply.set_result(self._last_chunk(body))
        except Exception as error:
            self._reply.set_exception(error)

    def _last_chunk(self, body: dict[str, Any]) -> Any:
        """Chunks hold all there is so far, so the last one is the whole reply."""
        data = json.dumps({**body, "stream": True}).encode()
        url = f"{self.subject.server.url}/generate"
        headers = {"Content-Type": "application/json", **key_headers(url)}
        call = urllib.request.Request(url, data, headers)
        last = None
        with urllib.request.urlopen(call, timeout=240) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    self.num_tokens = len(last["output_ids"])
        return last
