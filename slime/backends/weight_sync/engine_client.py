"""The calls of one weight update to one engine, and the same call to several at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slime.backends.weight_sync.liveness import Patience, allowed_s, require_alive
from slime.utils.sync_http import Call, HttpError, JsonServer
from slime.utils.types import EngineInfo

_CONTROL_TIMEOUT_S = 120.0
_FLUSH_TIMEOUT_S = 30.0

Result = TypeVar("Result")


@dataclass(kw_only=True, frozen=True)
class RankSums:
    """Checksums of the parameters that one rank of an engine holds."""

    tp_rank: int
    sums: dict[str, str]


class EngineClient:
    """Made for one update; gives its connection back with `close`."""

    def __init__(
        self, info: EngineInfo, token: str | None, patience: Patience | None = None
    ) -> None:
        self.info = info
        self.nbytes = 0  # of the weights it was sent in all
        self._server = JsonServer(info.url, token)
        self._patience = patience or Patience()
        self._session_open = False
        self.silent = False  # a call to it was not answered

    @property
    def url(self) -> str:
        return self.info.url

    def pause(self, mode: str) -> None:
        self.post("/pause_generation", {"mode": mode})

    def begin(self) -> None:
        """Open an update session; servers that know none answer 404 and need none.

        A server that was silent for a while may have one of an update that was given up.
        """
        try:
            self.post("/begin_weight_update", {})
        except HttpError as error:
            if error.status == 404:
                return
            if error.status != 400 or "already open" not in str(error):
                raise
            self.post("/end_weight_update", {})
            self.post("/begin_weight_update", {})
        self._session_open = True

    def end(self) -> None:
        if self._session_open:
            self._session_open = False
            self.post("/end_weight_update", {})

    def abandon(self) -> None:
        """Close the session of an update that failed, if the server can still be asked to."""
        if self._session_open and not self.silent:
            self._session_open = False
            with suppress(HttpError):  # it may be what failed
                self.post("/end_weight_update", {}, timeout=self._patience.answer_s)

    def update(
        self, route: str, payload: dict[str, Any], *, nbytes: int = 0, timeout: float | None = None
    ) -> None:
        """One of the /update_weights_from_* calls; also checks the `success` it answers."""
        self.start_update(route, payload, nbytes=nbytes, timeout=timeout)()

    def start_update(
        self, route: str, payload: dict[str, Any], *, nbytes: int = 0, timeout: float | None = None
    ) -> Callable[[], None]:
        """The same, but the answer is waited for only when what is returned is called."""
        call = self._start("POST", route, payload, timeout or allowed_s(nbytes))

        def finish() -> None:
            reply = self._result(call)
            if not (isinstance(reply, dict) and reply.get("success") is True):
                raise HttpError(f"POST {self.url}{route}: {reply}")

        return finish

    def flush(self) -> None:
        """Forget cached keys and values; refused for a moment while requests are being put back."""
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while True:
            try:
                self.post("/flush_cache", {})
                return
            except HttpError as error:
                if error.status != 400 or time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def checksums(self) -> dict[str, int]:
        """Checksum by Hugging Face name; the parts that several ranks of an engine hold add up."""
        reply = self._ask_checksums()
        total: dict[str, int] = {}
        for rank in reply["ranks"]:
            for name, value in rank["checksums"].items():
                total[name] = (total.get(name, 0) + int(value, 16)) % 2**64
        return total

    def served_checksums(self) -> list[RankSums]:
        """SGLang's checksums by its own parameter names, of each rank."""
        reply = self._ask_checksums()
        return [_rank_sums(rank) for rank in reply["ranks"]]

    def server_info(self) -> dict[str, Any]:
        return self._get("/server_info")

    def architectures(self) -> list[str] | None:
        return self._get("/model_info").get("architectures")

    def weight_version(self) -> str:
        return str(self._get("/model_info")["weight_version"])

    def resume(self) -> None:
        self.post("/continue_generation", {})

    def post(self, route: str, payload: dict[str, Any], timeout: float = _CONTROL_TIMEOUT_S) -> Any:
        return self._result(self._start("POST", route, payload, timeout))

    def close(self) -> None:
        self._server.close()

    def _get(self, route: str) -> Any:
        return self._result(self._start("GET", route, None, _CONTROL_TIMEOUT_S))

    def _start(
        self, method: str, route: str, payload: dict[str, Any] | None, timeout: float
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

    def _ask_checksums(self) -> dict[str, Any]:
        body = {"action": "checksum"}
        return self.post("/weights_checker", body, timeout=allowed_s(self.nbytes))


def _rank_sums(reply: dict[str, Any]) -> RankSums:
    """Version 0.5.23 says where a rank is once per model of a server, 0.5.16 once."""
    where = reply["parallelism_info"]
    where = where[0] if isinstance(where, list) else where
    return RankSums(tp_rank=where["tp_rank"], sums=reply["checksums"])


def on_all(engines: Sequence[EngineClient], call: Callable[[EngineClient], Result]) -> list[Result]:
    """`call` on every engine at once; all have ended when this returns or raises the failures."""
    if len(engines) < 2:
        return [call(engine) for engine in engines]
    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(call, engine) for engine in engines]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if len(errors) > 1 and all(isinstance(error, HttpError) for error in errors):
        raise HttpError("; ".join(str(error) for error in errors)) from errors[0]
    return [future.result() for future in futures]
