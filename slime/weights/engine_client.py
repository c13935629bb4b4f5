"""The HTTP calls of one weight update to one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slime.core.types import EngineInfo
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import Call, HttpError, JsonClient, get_json

if TYPE_CHECKING:
    from slime.config.arguments import Args

PAUSE_MODE = "retract"  # what running requests do is in sync.py
_CONTROL_TIMEOUT_S = 120.0
_FLUSH_TIMEOUT_S = 30.0
_FLUSH_PAUSE_S = 0.05
_MIN_TRANSFER_TIMEOUT_S = 60.0
_MIN_BYTES_PER_S = 16 * 2**20


@dataclass(kw_only=True, frozen=True)
class LivenessProbe:
    """Every `interval_s` without a reply, the server must answer GET /model_info within `timeout_s`.

    An engine that is busy with a bucket does not answer routes that involve its scheduler. The HTTP process
    answers /model_info all the same, unless it is frozen or dead.
    """

    interval_s: float = 30.0
    timeout_s: float = 30.0

    @classmethod
    def of(cls, args: Args) -> LivenessProbe:
        return cls(
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
        )

    def check(self, url: str) -> None:
        """Raise HttpError unless the server at `url` answers."""
        try:
            get_json(f"{url}/model_info", timeout=self.timeout_s, retries=0)
        except HttpError as error:
            raise HttpError(f"it no longer answers: {error}") from error


@dataclass(kw_only=True, frozen=True)
class RankChecksums:
    """Checksums of the parameters that one rank of an SGLang server holds, by SGLang's names."""

    tp_rank: int
    checksums: dict[str, str]


@dataclass(kw_only=True, frozen=True)
class HeldWeights:
    """What an engine reports: its version and, if requested, checksums by Hugging Face name."""

    version: str
    checksums: dict[str, int]


def transfer_timeout_s(nbytes: int) -> float:
    """Return the timeout of a call that moves `nbytes`: 92 s for 512 MiB."""
    return _MIN_TRANSFER_TIMEOUT_S + nbytes / _MIN_BYTES_PER_S


def retry_flush(flush: Callable[[], Any], timeout_s: float) -> None:
    """Repeat `flush` until the server accepts it: it answers 400 while requests are running."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            flush()
            return
        except HttpError as error:
            if error.status != 400 or time.monotonic() > deadline:
                raise
        time.sleep(_FLUSH_PAUSE_S)


class EngineClient:
    """The connections to one engine during one update; `close` closes them.

    Methods named `start_*` send requests and return a function that waits for the replies. The embedded
    engine gets independent requests at the same time, an SGLang server one after another.
    """

    def __init__(
        self, info: EngineInfo, token: str | None, probe: LivenessProbe | None = None
    ) -> None:
        self.info = info
        self.nbytes = 0  # of all weights that were sent to it
        self.unresponsive = False  # a call to it got no reply
        remember_key([info.url], token)
        self._client = JsonClient(info.url, token)
        self._probe = probe or LivenessProbe()
        self._begin: Call | None = None  # not answered yet
        self._session_open = False

    @property
    def url(self) -> str:
        return self.info.url

    def start_session(self) -> Callable[[], None]:
        """Pause generation and open an update session."""
        if self.info.kind == "sglang":
            self.post("/pause_generation", {"mode": PAUSE_MODE})
            self._begin = self._start("POST", "/begin_weight_update", {})
            self._finish_begin()
            return lambda: None
        pause = self.start_pause(PAUSE_MODE)
        self._begin = self._start("POST", "/begin_weight_update", {})
        waits = {"pause": pause, "begin": self._finish_begin}

        def finish() -> None:
            self._wait_all(waits)

        return finish

    def start_commit(self, *, with_checksums: bool) -> Callable[[], HeldWeights]:
        """Close the session, drop the KV cache, then report what the engine holds."""
        if self.info.kind == "sglang":
            return self._commit_one_by_one
        waits: dict[str, Callable[[], Any]] = {}
        if with_checksums:  # first, because they take longest
            waits["checksums"] = partial(self._sum_over_ranks, self._start_checksums())
        if self._session_open:
            waits["end"] = partial(self._result, self._start_end())
        waits["flush"] = partial(self._flush, self._start("POST", "/flush_cache", {}))
        waits["version"] = partial(self._version, self._start("GET", "/model_info"))

        def finish() -> HeldWeights:
            replies = self._wait_all(waits)
            return HeldWeights(version=replies["version"], checksums=replies.get("checksums", {}))

        return finish

    def abort_session(self) -> None:
        """Close the session of an update that failed, if the server still answers."""
        with suppress(HttpError):  # the engine may be what failed
            if not self.unresponsive:
                self._finish_begin()
            if self._session_open and not self.unresponsive:
                self._result(self._start_end(self._probe.timeout_s))

    def update(
        self, route: str, payload: dict[str, Any], *, nbytes: int = 0, timeout: float | None = None
    ) -> dict[str, Any]:
        """Make a call that changes weights or adapters, check `success` in the reply and return it."""
        return self.start_update(route, payload, nbytes=nbytes, timeout=timeout)()

    def start_update(
        self, route: str, payload: dict[str, Any], *, nbytes: int = 0, timeout: float | None = None
    ) -> Callable[[], dict[str, Any]]:
        """Send what `update` sends, and return a function that waits for the reply and checks it."""
        call = self._start("POST", route, payload, timeout=timeout or transfer_timeout_s(nbytes))

        def finish() -> dict[str, Any]:
            reply = self._result(call)
            if not (isinstance(reply, dict) and reply.get("success") is True):
                raise HttpError(f"POST {self.url}{route}: {reply}")
            return reply

        return finish

    def rank_checksums(self) -> list[RankChecksums]:
        """Return SGLang's checksums of each rank, by SGLang's parameter names."""
        reply = self._result(self._start_checksums())
        return [_rank_checksums(rank) for rank in reply["ranks"]]

    def start_pause(self, mode: str) -> Callable[[], None]:
        """Pause generation; `mode` decides what happens to running requests."""
        return partial(self._result, self._start("POST", "/pause_generation", {"mode": mode}))

    def start_resume(self) -> Callable[[], None]:
        """Continue generation."""
        return partial(self._result, self._start("POST", "/continue_generation", {}))

    def get(self, route: str) -> Any:
        return self._result(self._start("GET", route))

    def post(self, route: str, payload: dict[str, Any], timeout: float = _CONTROL_TIMEOUT_S) -> Any:
        return self._result(self._start("POST", route, payload, timeout=timeout))

    def close(self) -> None:
        self._client.close()

    def _finish_begin(self) -> None:
        """Wait until the session is open. Servers without sessions answer 404 and need none.

        A server that was frozen for a while may still have the session of an aborted update.
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

    def _commit_one_by_one(self) -> HeldWeights:
        if self._session_open:
            self._result(self._start_end())
        self._flush(self._start("POST", "/flush_cache", {}))
        version = self._version(self._start("GET", "/model_info"))
        return HeldWeights(version=version, checksums={})

    def _start_end(self, timeout: float = _CONTROL_TIMEOUT_S) -> Call:
        self._session_open = False
        return self._start("POST", "/end_weight_update", {}, timeout=timeout)

    def _flush(self, first: Call) -> None:
        started = [first]

        def flush() -> None:
            self._result(started.pop() if started else self._start("POST", "/flush_cache", {}))

        retry_flush(flush, _FLUSH_TIMEOUT_S)

    def _start_checksums(self) -> Call:
        timeout = transfer_timeout_s(self.nbytes)
        return self._start("POST", "/weights_checker", {"action": "checksum"}, timeout=timeout)

    def _sum_over_ranks(self, call: Call) -> dict[str, int]:
        """Add up the checksums of the shards that several ranks of an engine hold."""
        total: dict[str, int] = {}
        for rank in self._result(call)["ranks"]:
            for name, value in rank["checksums"].items():
                total[name] = (total.get(name, 0) + int(value, 16)) % 2**64
        return total

    def _version(self, call: Call) -> str:
        return str(self._result(call)["weight_version"])

    def _wait_all(self, waits: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return every reply; raise the first failure once all others have been waited for."""
        replies, failures = {}, []
        for name, wait in waits.items():
            if not self.unresponsive:
                try:
                    replies[name] = wait()
                except HttpError as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return replies

    def _start(
        self,
        method: str,
        route: str,
        payload: dict[str, Any] | None = None,
        *,
        timeout: float = _CONTROL_TIMEOUT_S,
    ) -> Call:
        with self._note_unresponsive():
            return self._client.start(method, route, payload, timeout=timeout)

    def _result(self, call: Call) -> Any:
        """Wait for a reply as long as the server answers the liveness probe."""
        with self._note_unresponsive():
            return call.result(self._probe.interval_s, partial(self._probe.check, self.url))

    @contextmanager
    def _note_unresponsive(self) -> Iterator[None]:
        try:
            yield
        except HttpError as error:
            self.unresponsive = self.unresponsive or error.status is None
            raise


def _rank_checksums(reply: dict[str, Any]) -> RankChecksums:
    """Read one rank; SGLang 0.5.23 reports its position once per model of a server, 0.5.16 once."""
    position = reply["parallelism_info"]
    position = position[0] if isinstance(position, list) else position
    return RankChecksums(tp_rank=position["tp_rank"], checksums=reply["checksums"])
