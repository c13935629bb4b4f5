"""A server process: started in a process group of its own with a log file of its own, waited for, stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from slime.config.env import child_env
from slime.utils.engine_keys import forget_keys, remember_key
from slime.utils.printable import safe_text
from slime.utils.sync_http import HttpError, get_json

_STOP_TIMEOUT_S = 10
_LAST_LINES = 15
_TAIL_BYTES = 65536
_START_TIMEOUT_S = 3600.0  # reading hundreds of gigabytes from a slow disk, and capturing graphs
_SILENT_TIMEOUT_S = 600.0  # a server that makes progress writes a line now and then
_POLL_S = 0.5


class ServerProcess:
    """Started by the constructor. Processes that it starts in turn end with it."""

    def __init__(self, command: list[str], log_path: Path, env: dict[str, str] | None = None):
        self.log_path = log_path
        # Servers print all their settings, keys of their routes among them.
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
        """Terminate it, then kill what is left of its process group."""
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
    """Why a server did not come up, as the end of a sentence."""


def wait_until_ready(
    url: str,
    *,
    label: str,
    log_path: Path,
    ended: Callable[[], int | None],
    owns_port: Callable[[int], bool],
    key: str | None,
    start_timeout_s: float = _START_TIMEOUT_S,
    silent_timeout_s: float = _SILENT_TIMEOUT_S,
) -> None:
    """Return once the server that was started answers; raise StartError if it exits, stops logging or is late.

    The key is sent only to a process of this run: another one may have taken the port first. `label` is
    the version of the weights that the server must report.
    """
    forget_keys([url])  # an earlier server may have had this port
    started = time.monotonic()
    while not _answers(url, label, owns_port, key):
        status = ended()
        if status is not None:
            raise StartError(f"ended with status {status}")
        if time.monotonic() - started > start_timeout_s:
            raise StartError(f"was not up after {start_timeout_s:.0f} s")
        silent_s = time.time() - log_path.stat().st_mtime
        if min(silent_s, time.monotonic() - started) > silent_timeout_s:
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
