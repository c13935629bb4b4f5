"""A server process with a log file of its own, in a process group of its own, ended by its id."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil

from slime.config.env import child_env
from slime.utils.printable import safe_text

_STOP_TIMEOUT_S = 10
_LAST_LINES = 15
_TAIL_BYTES = 65536


class ServerProcess:
    """Started with the constructor. What it starts in turn ends with it."""

    def __init__(self, command: list[str], log_path: Path, env: dict[str, str] | None = None):
        self.log_path = log_path
        # Servers print all their settings, keys of their routes among them.
        log_path.touch(mode=0o600)
        self._log_start = log_path.stat().st_size  # what an earlier server wrote is not its own
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
        """None while it runs."""
        return self._process.poll()

    def listens_at(self, port: int) -> bool:
        """Whether this process, or one that it started, is the one that listens at the port."""
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
        """Ask it to end, then end it with all its processes."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _connections(process: psutil.Process) -> list[Any]:
    """Psutil 6 has renamed the method."""
    find = getattr(process, "net_connections", None) or process.connections
    return find("tcp")


def _is_listener(place: Any, port: int) -> bool:
    return place.status == psutil.CONN_LISTEN and place.laddr.port == port


def _die_with_parent() -> None:
    """A server must not outlive a killed run."""
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
