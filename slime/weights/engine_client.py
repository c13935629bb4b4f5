"""The calls of one weight update to one engine, and the same call to several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slime.core.types import EngineInfo
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import Call, HttpError, JsonServer
from slime.weights.liveness import Patience, allowed_s, require_alive

_CONTROL_TIMEOUT_S = 120.0
_FLUSH_TIMEOUT_S = 30.0

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(kw_only=True, frozen=True)
class RankSums:
    """Checksums of the parameters that one rank of an engine holds."""

    tp_rank: int
    sums: dict[str, str]


@dataclass(kw_only=True, frozen=True)
class Held:
    """What an engine says it holds: the version and, if it was asked for them, checksums by Hugging
    Face name."""

    version: str
    sums: dict[str, int]


class EngineClient:
    """Made for one update; gives its connections back with `close`.

    The embedded engine is asked for several things at once where none of them needs another; an SGLang
    server is asked for one after the other.
    """

    def __init__(
        self, info: EngineInfo, token: str | None, patience: Patience | None = None
    ) -> None:
        self.info = info
        self.nbytes = 0  # of the weights it was sent in all
        remember_key([info.url], token)
        self._server = JsonServer(info.url, token)
        self._patience = patience or Patience()
        self._begin: Call | None = None  # not answered yet
        self._session_open = False
        self.silent = False  # a call to it was not answered

    @property
    def url(self) -> str:
        return self.info.url

    def start_session(self, pause_mode: str) -> Callable[[], None]:
        """Pause generation and open an update session; done once what is returned was called."""
        if self.info.kind == "sglang":
            self.post("/pause_generation", {"mode": pause_mode})
            self._begin = self._start("POST", "/begin_weight_update", {})
            self._finish_begin()
            return lambda: None
        pause = self._start("POST", "/pause_generation", {"mode": pause_mode})
        self._begin = self._start("POST", "/begin_weight_update", {})
        waits = {"pause": partial(self._result, pause), "begin": self._finish_begin}
        return lambda: self._all_of(waits)

    def start_commit(self, *, with_sums: bool) -> Callable[[], Held]:
        """End the session, forget cached keys and values, and say what is held then."""
        if self.info.kind == "sglang":
            return self._commit_in_turn
        waits: dict[str, Callable[[], Any]] = {}
        if with_sums:  # takes longest
            waits["sums"] = partial(self._sums_of, self._start_checksums())
        if self._session_open:
            waits["end"] = partial(self._result, self._start_end())
        waits["flush"] = partial(self._flushed, self._start("POST", "/flush_cache", {}))
        waits["version"] = partial(self._version_of, self._start("GET", "/model_info"))

        def finish() -> Held:
            answers = self._all_of(waits)
            return Held(version=answers["version"], sums=answers.get("sums", {}))

        return finish

    def abandon(self) -> None:
        """Close the session of an update that failed, if the server can still be asked to."""
        with suppress(HttpError):  # it may be what failed
            if not self.silent:
                self._finish_begin()
            if self._session_open and not self.silent:
                self._result(self._start_end(self._patience.answer_s))

    def update(
        self, route: str, payload: dict[str, Any], *, nbytes: int = 0, timeout: float | None = None
    ) -> None:
        """One of the /update_weights_from_* calls; also checks the `success` it answers."""
        self.start_update(route, payload, nbytes=nbytes, timeout=timeout)()

    def start_update(
        self, route: str, payload: dict[str, Any], *, nbytes: int = 0, timeout: float | None = None
    ) -> Callable[[], None]:
        """The same, but the answer is waited for only when what is returned is called."""
        call = self._start("POST", route, payload, timeout=timeout or allowed_s(nbytes))

        def finish() -> None:
            reply = self._result(call)
            if not (isinstance(reply, dict) and reply.get("success") is True):
                raise HttpError(f"POST {self.url}{route}: {reply}")

        return finish

    def served_checksums(self) -> list[RankSums]:
        """SGLang's checksums by its own parameter names, of each rank."""
        reply = self._result(self._start_checksums())
        return [_rank_sums(rank) for rank in reply["ranks"]]

    def server_info(self) -> dict[str, Any]:
        return self._get("/server_info")

    def architectures(self) -> list[str] | None:
        return self._get("/model_info").get("architectures")

    def start_resume(self) -> Callable[[], None]:
        """Generation goes on; over once what is returned was called."""
        return partial(self._result, self._start("POST", "/continue_generation", {}))

    def post(self, route: str, payload: dict[str, Any], timeout: float = _CONTROL_TIMEOUT_S) -> Any:
        return self._result(self._start("POST", route, payload, timeout=timeout))

    def close(self) -> None:
        self._server.close()

    def _finish_begin(self) -> None:
        """Servers that know no sessions answer 404 and need none.

        A server that was silent for a while may have one of an update that was given up.
        """
        call, self._begin = self._begin, None
        if call is None:
            return
        try:
            self._result(call)
        except HttpError as error:
            if error.status == 404:
                return
            if error.status != 400 or "already open" not in str(error):
                raise
            self.post("/end_weight_update", {})
            self.post("/begin_weight_update", {})
        self._session_open = True

    def _commit_in_turn(self) -> Held:
        if self._session_open:
            self._result(self._start_end())
        self._flushed(self._start("POST", "/flush_cache", {}))
        return Held(version=self._version_of(self._start("GET", "/model_info")), sums={})

    def _start_end(self, timeout: float = _CONTROL_TIMEOUT_S) -> Call:
        self._session_open = False
        return self._start("POST", "/end_weight_update", {}, timeout=timeout)

    def _flushed(self, call: Call) -> None:
        """Refused for a moment while requests are being put back: asked again then."""
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while True:
            try:
                self._result(call)
                return
            except HttpError as error:
                if error.status != 400 or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)
            call = self._start("POST", "/flush_cache", {})

    def _start_checksums(self) -> Call:
        body = {"action": "checksum"}
        return self._start("POST", "/weights_checker", body, timeout=allowed_s(self.nbytes))

    def _sums_of(self, call: Call) -> dict[str, int]:
        """The parts that several ranks of an engine hold add up."""
        total: dict[str, int] = {}
        for rank in self._result(call)["ranks"]:
            for name, value in rank["checksums"].items():
                total[name] = (total.get(name, 0) + int(value, 16)) % 2**64
        return total

    def _version_of(self, call: Call) -> str:
        return str(self._result(call)["weight_version"])

    def _get(self, route: str) -> Any:
        return self._result(self._start("GET", route))

    def _all_of(self, waits: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Every answer, or the first failure once all that can come have come."""
        answers, failures = {}, []
        for name, wait in waits.items():
            if not self.silent:
                try:
                    answers[name] = wait()
                except HttpError as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def _start(
        self,
        method: str,
        route: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout: float = _CONTROL_TIMEOUT_S,
    ) -> Call:
        with self._noting_silence():
            return self._server.start(method, route, payload, timeout=timeout)

    def _result(self, call: Call) -> Any:
        """Given up early if the server falls silent altogether."""
        with self._noting_silence():
            look = partial(require_alive, self.url, self._patience)
            return call.result(self._patience.look_every_s, look)

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        try:
            yield
        except HttpError as error:
            self.silent = self.silent or error.status is None
            raise


def _rank_sums(reply: dict[str, Any]) -> RankSums:
    """Version 0.5.23 says where a rank is once per model of a server, 0.5.16 once."""
    where = reply["parallelism_info"]
    where = where[0] if isinstance(where, list) else where
    return RankSums(tp_rank=where["tp_rank"], sums=reply["checksums"])


def on_all(items: Sequence[Item], call: Callable[[Item], Result]) -> list[Result]:
    """`call` for every engine at once; all have ended when this returns or raises the failures."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(len(items)) as pool:
        futures = [pool.submit(call, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if len(errors) > 1 and all(isinstance(error, HttpError) for error in errors):
        raise HttpError("; ".join(str(error) for error in errors)) from errors[0]
    return [future.result() for future in futures]
