"""Exits a process whose Ray head is gone, so that no process is left waiting on another node.

Ray notices at once that the head's processes died, but not that its host is off or unreachable: no
connection is closed then, and it would wait for many minutes. So the head's port is probed.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from slime.config.env import read_env
from slime.diagnosis.ray_processes import RayProcess

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
_PROCESS_POLL_S = 0.1
_PROBES = 6  # within Ray's own timeout


def answers(address: str, timeout: float = _PROBE_TIMEOUT_S) -> bool:
    """Return whether a process listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """Until `stop`, exit this process with status 1 once the head has not answered for Ray's own timeout."""

    def __init__(self, address: str):
        self._address, self._stopped = address, threading.Event()
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        timeout = read_env().head_timeout_s
        last_answer = time.monotonic()
        failed = (
            False  # by a probe, not by the clock alone: this process itself may have been stopped
        )
        while not failed or time.monotonic() - last_answer < timeout:
            if self._stopped.wait(timeout / _PROBES):
                return
            failed = not answers(self._address)
            if not failed:
                last_answer = time.monotonic()
        logger.error(
            "Ray's head at %s has not answered for %.0f s: exiting", self._address, timeout
        )
        if not self._stopped.is_set():
            os._exit(1)  # the other threads wait for replies that will not come


class ProcessWatch:
    """Calls `on_death` once, from a thread, with the first of these processes that has died."""

    def __init__(self, processes: list[RayProcess], on_death: Callable[[RayProcess], None]):
        self._processes, self._on_death = processes, on_death
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="process-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_PROCESS_POLL_S):
            for process in self._processes:
                if not process.running():
                    self._on_death(process)
                    return
