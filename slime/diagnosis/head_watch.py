"""Ends a process whose Ray head is gone, so that none is left waiting on a node nobody looks at.

Ray hears at once of a head whose processes died, but not of one whose host is off or cut off: no connection
is closed then, and it would wait many minutes. A knock at the head's door tells.
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

_KNOCK_S = 5.0
_PROCESS_POLL_S = 0.1
_KNOCKS = 6  # while Ray's patience lasts


def answers(address: str, timeout: float = _KNOCK_S) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """From now until `stop` this process ends with status 1 once the head has not answered for as long as
    Ray itself would look for it."""

    def __init__(self, address: str):
        self._address, self._stopped = address, threading.Event()
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        patience = read_env().head_timeout_s
        heard = time.monotonic()
        silent = False  # only a knock tells: this process itself may have stood still
        while not silent or time.monotonic() - heard < patience:
            if self._stopped.wait(patience / _KNOCKS):
                return
            silent = not answers(self._address)
            if not silent:
                heard = time.monotonic()
        logger.error("Ray's head at %s is silent for %.0f s: ending", self._address, patience)
        if not self._stopped.is_set():
            os._exit(1)  # whatever the other threads wait for will not come


class ProcessWatch:
    """Calls `on_death` once, from a thread, with the first of these processes that is gone."""

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
