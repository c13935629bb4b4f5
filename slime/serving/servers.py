"""Engine and router servers: start in a process group with a log file, wait until ready, check, stop.

Checks go over HTTP: does a server answer, is it idle, does an engine compute what the trainer computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil

from slime.config.env import child_env
from slime.core.errors import WeightMismatchError
from slime.core.types import Activity, EngineInfo, Probe
from slime.utils.concurrency import call_all
from slime.utils.engine_keys import forget_keys, remember_key
from slime.utils.printable import safe_text
from slime.utils.sync_http import HttpError, get_json, post_json
from slime.weights.engine_client import retry_flush

_STOP_TIMEOUT_S = 10
_LAST_LINES = 15
_TAIL_BYTES = 65536
START_TIMEOUT_S = 3600.0  # reading hundreds of gigabytes from a slow disk, and capturing graphs
_SILENT_TIMEOUT_S = 600.0  # a server that makes progress writes to its log
_POLL_S = 0.5
_PORT_POLL_S = 0.05
_MEMORY_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 120.0


class ServerProcess:
    """A server started by the constructor, in a process group that `stop` kills."""

    def __init__(self, command: list[str], log_path: Path, env: dict[str, str] | None = None):
        self.log_path = log_path
        # Servers print all their settings, including API keys.
        log_path.touch(mode=0o600)
        self._log_start = log_path.stat().st_size  # after what an earlier server wrote
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_env(**(env or {})),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def listens_at(self, port: int) -> bool:
        """Return whether this process, or one that it started, listens at the port."""
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    if any(_is_listener(place, port) for place in _connections(process)):
                        return True
        return False

    def last_lines(self, count: int = _LAST_LINES) -> str:
        with self.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, log.tell() - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        lines = [line for line in safe_text(text).split("\n") if line.strip()]
        return "\n".join(lines[-count:])

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Terminate it, then kill the rest of its process group."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _connections(process: psutil.Process) -> list[Any]:
    """Return its TCP sockets; psutil 6 has renamed the method."""
    find = getattr(process, "net_connections", None) or process.connections
    return find("tcp")


def _is_listener(place: Any, port: int) -> bool:
    return place.status == psutil.CONN_LISTEN and place.laddr.port == port


def _die_with_parent() -> None:
    """Have the kernel kill the server when its parent dies, so that it does not outlive a killed run."""
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class StartError(Exception):
    """Why a server did not start; the message completes a sentence about the server."""


def wait_for_port(process: ServerProcess, port_file: Path, timeout_s: float) -> int:
    """Return the port that an embedded engine writes once it answers; raise StartError if it never does."""
    started = time.monotonic()
    while not port_file.exists():
        if (status := process.status()) is not None:
            raise StartError(f"ended with status {status}")
        if time.monotonic() - started > timeout_s:
            raise StartError(f"was not ready after {timeout_s:.0f} s")
        time.sleep(_PORT_POLL_S)
    return json.loads(port_file.read_text())["port"]


def wait_until_ready(
    url: str,
    *,
    label: str,
    log_path: Path,
    ended: Callable[[], int | None],
    owns_port: Callable[[int], bool],
    key: str | None,
    start_timeout_s: float = START_TIMEOUT_S,
    silent_timeout_s: float = _SILENT_TIMEOUT_S,
) -> None:
    """Return once the started server answers; raise StartError if it exits, stops logging or times out.

    The key is sent only to a process of this run: another process may have taken the port first. `label`
    is the version of the weights that the server must report.
    """
    forget_keys([url])  # an earlier server may have had this port
    started = time.monotonic()
    while not _answers(url, label, owns_port, key):
        status = ended()
        if status is not None:
            raise StartError(f"ended with status {status}")
        if time.monotonic() - started > start_timeout_s:
            raise StartError(f"was not up after {start_timeout_s:.0f} s")
        idle_s = time.time() - log_path.stat().st_mtime
        if min(idle_s, time.monotonic() - started) > silent_timeout_s:
            raise StartError(f"has written nothing for {silent_timeout_s:.0f} s")
        time.sleep(_POLL_S)


def _answers(url: str, label: str, owns_port: Callable[[int], bool], key: str | None) -> bool:
    try:
        get_json(f"{url}/health_generate", timeout=30, retries=0)
        if not owns_port(urlsplit(url).port or 80):
            raise StartError(f"found port {url} already in use by another server")
        remember_key([url], key)
        found = get_json(f"{url}/model_info", timeout=10, retries=0)["weight_version"]
    except (HttpError, KeyError, TypeError):
        return False
    if found != label:
        raise StartError(f"found port {url} already in use by another server")
    return True


class HasProcesses(Protocol):
    def alive(self, timeout: float) -> bool: ...


def failed_engines(
    handles: Sequence[HasProcesses],
    infos: list[EngineInfo],
    *,
    timeout: float,
    route: str = "/health",
) -> list[int]:
    """Return the indices of the engines that are dead or do not answer in time."""
    pairs = list(zip(handles, infos, strict=True))
    healthy = call_all(
        pairs, lambda pair: pair[0].alive(timeout) and answers(pair[1].url, timeout, route)
    )
    return [index for index, ok in enumerate(healthy) if not ok]


def health_route(paused: bool) -> str:
    """Return the route that a healthy server answers in time.

    SGLang's /health generates a token, which a paused server cannot. Its /server_info also needs the
    scheduler and works while paused.
    """
    return "/server_info" if paused else "/health"


def answers(url: str, timeout: float, route: str = "/health") -> bool:
    try:
        get_json(url + route, timeout=timeout, retries=0)
    except HttpError:
        return False
    return True


def engine_memory(engines: Sequence[EngineInfo]) -> dict[str, Activity]:
    """Return the memory of embedded engines, by "engine_0", ...; engines that do not answer are omitted."""

    def read_memory(engine: EngineInfo) -> dict[str, int]:
        with contextlib.suppress(HttpError, LookupError, TypeError):
            found = get_json(f"{engine.url}/server_info", timeout=_MEMORY_TIMEOUT_S, retries=0)
            return dict(found["internal_states"][0]["memory"])
        return {}

    known = [(i, engine) for i, engine in enumerate(engines) if engine.kind == "slime"]
    memory = call_all([engine for _, engine in known], read_memory) if known else []
    return {
        f"engine_{i}": Activity(memory=held)
        for (i, _), held in zip(known, memory, strict=True)
        if held
    }


def flush_until_idle(
    url: str,
    token: str | None,
    timeout_s: float = _FLUSH_TIMEOUT_S,
    *,
    answer_timeout_s: float = _FLUSH_TIMEOUT_S,
) -> None:
    """Flush a server's cache, which succeeds only once the server is idle, within `timeout_s`.

    SGLang exits when its memory is released while a request is running, so flush first. A healthy server
    answers each attempt immediately: one that takes longer than `answer_timeout_s` hangs.
    """

    def flush() -> None:
        post_json(f"{url}/flush_cache", {}, token=token, timeout=answer_timeout_s)

    retry_flush(flush, timeout_s)


def check_probe(engine: EngineInfo, probe: Probe) -> None:
    """Raise WeightMismatchError if the engine's log-probs of the probe's tokens are not the trainer's."""
    found = _probe_log_probs(engine.url, probe)
    # The mean: a single improbable token is off by half a unit in bf16 with the right weights.
    gap = fmean(abs(a - b) for a, b in zip(found, probe.log_probs, strict=True))
    if not gap <= probe.tolerance:
        raise WeightMismatchError(
            f"engine {engine.url} does not compute what the trainer computes: log-probs of the probe "
            f"tokens differ by {gap:.3g} on average (allowed {probe.tolerance:g}); its weights are not those "
            "sent, or its model differs"
        )


def _probe_log_probs(url: str, probe: Probe) -> list[float]:
    """Score each token as the next generated one: engines apply the temperature only to those logits."""
    tokens = list(probe.tokens)
    body = {
        "input_ids": [tokens[:end] for end in range(1, len(tokens))],
        "sampling_params": {"temperature": probe.temperature, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [[token] for token in tokens[1:]],
        **({} if probe.adapter is None else {"lora_path": probe.adapter}),
    }
    replies = post_json(f"{url}/generate", body, timeout=_PROBE_TIMEOUT_S)
    with contextlib.suppress(LookupError, TypeError, ValueError):
        entries = [reply["meta_info"]["output_token_ids_logprobs"][0][0] for reply in replies]
        if len(entries) == len(probe.log_probs):
            return [float(entry[0]) for entry in entries]
    raise HttpError(
        f"engine {url} replied without the log-probs of the probe tokens: {str(replies)[:200]}", 200
    )
