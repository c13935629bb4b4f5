"""Print the exit reason of a driver that could not print it itself: it was killed, or Ray ended it.

    driver ──pipe──▶ monitor (a separate process, standard library only)
       "bye"           the run reports its end itself: the monitor prints nothing
       end of file     the driver has died: the monitor prints why, and how to resume, to stderr

Ray ends a driver without an exception once its node's raylet is gone, or the head has not answered for
RAY_gcs_rpc_server_reconnect_timeout_s. It does not notice that the head's host is off or unreachable, because
no connection is closed then: `HeadWatch` probes the head's port and exits the process. If the run started
Ray itself, Ray's processes end with the driver, so the monitor polls them while the driver lives: a process
that died before the driver is the reason.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from slime.config.env import read_env
from slime.diagnosis.ray_processes import (
    RayProcess,
    identify,
    ignore_signals,
    start_companion,
)
from slime.runlog.checkpoint_folder import how_to_continue

logger = logging.getLogger(__name__)

_BYE = b"bye\n"
_SHOW_CURSOR = "\x1b[?25h"  # hidden by the driver's live display
_REASON_PROBES = 3  # one failure means that the head is going away
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_HEAD_PROBES = 6  # within Ray's own timeout
TITLES = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the monitor needs to explain the end of a run."""

    pid: int  # of the driver
    host: str  # its address
    head: str  # address of Ray's head, HOST:PORT
    raylet: str  # socket of the raylet on the driver's node
    own_ray: list[RayProcess]  # of the Ray that this process started; empty on a cluster
    save: str | None
    load: str | None
    ckpt_step: int | None = None
    start_rollout_id: int | None = None


class RunMonitor:
    def __init__(self, facts: RunFacts):
        self._process = start_companion("slime.diagnosis.run_monitor", json.dumps(asdict(facts)))

    def dismiss(self) -> None:
        """End the monitor without a message: the run reports its end itself."""
        with suppress(BrokenPipeError):
            self._process.communicate(_BYE)


def died(process: RayProcess) -> str:
    """Return the beginning of a sentence about a process of this run's own Ray."""
    title = TITLES.get(process.name, f"Ray's {process.name}")
    return f"{title} on this machine (pid {process.pid}) died"


def exit_reason(facts: RunFacts, first: RayProcess | None) -> str:
    """Return why the driver died, as far as other processes can see, and how to resume.

    `first` is the process of the run's own Ray that died before the driver.
    """
    driver = f"the driver (pid {facts.pid} on {facts.host})"
    advice = how_to_continue(facts.save, facts.load, facts.ckpt_step, facts.start_rollout_id)
    if first is not None:
        return f"{died(first)}, and {driver} with it.\n{advice}"
    if facts.own_ray:
        return f"{driver} was killed: by hand, or for lack of memory (dmesg).\n{advice}"
    if not _head_answers(facts.head):
        what = f"Ray's head at {facts.head} died or cannot be reached, and {driver} ended with it."
        host, _, port = facts.head.rpartition(":")
        again = f"ray start --head --node-ip-address={host} --port={port}"
        return (
            f"{what} Processes on other nodes exit within minutes.\n{advice}\nStart Ray again "
            f"first: {again}, and ray start --address={facts.head} on the other nodes."
        )
    if not raylet_answers(facts.raylet):
        return f"Ray's raylet on this node died, and {driver} with it.\n{advice}"
    return f"{driver} was killed: by hand, or for lack of memory (dmesg).\n{advice}"


def _head_answers(address: str) -> bool:
    for attempt in range(_REASON_PROBES):
        time.sleep(1.0 if attempt else 0)
        if not answers(address):
            return False
    return True


def raylet_answers(path: str) -> bool:
    """Return whether a raylet listens at this socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def main() -> None:
    ignore_signals()
    values = json.loads(sys.argv[1])
    own_ray = [RayProcess(**process) for process in values.pop("own_ray")]
    facts = RunFacts(**values, own_ray=own_ray)
    message, first = _wait_for_driver(identify("driver", facts.pid), own_ray)
    if message != _BYE:
        if sys.stderr.isatty():
            print(_SHOW_CURSOR, end="", file=sys.stderr)
        print(f"slime: {exit_reason(facts, first)}", file=sys.stderr)


def _wait_for_driver(
    driver: RayProcess, own_ray: list[RayProcess]
) -> tuple[bytes, RayProcess | None]:
    """Return the driver's message once it closes the pipe, and the process of Ray that died before.

    The kernel kills Ray's processes with the driver's main thread, some time before its last thread is
    gone and the pipe is closed.
    """
    message, first = b"", None
    while True:
        if select.select([0], [], [], _POLL_S if own_ray else None)[0]:
            part = os.read(0, 1024)
            if not part:
                return message, first
            message += part
        elif first is None:
            dead = [process for process in own_ray if not process.running()]
            first = dead[0] if dead and driver.running() else None


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
        # A probe must fail, not the clock alone: this process itself may have been stopped.
        failed = False
        while not failed or time.monotonic() - last_answer < timeout:
            if self._stopped.wait(timeout / _HEAD_PROBES):
                return
            failed = not answers(self._address)
            if not failed:
                last_answer = time.monotonic()
        logger.error(
            "Ray's head at %s has not answered for %.0f s: exiting", self._address, timeout
        )
        if not self._stopped.is_set():
            os._exit(1)  # all other threads wait for replies that will not come


class ProcessWatch:
    """Calls `on_death` once, from a thread, with the first of these processes that has died."""

    def __init__(self, processes: list[RayProcess], on_death: Callable[[RayProcess], None]):
        self._processes, self._on_death = processes, on_death
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="process-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            for process in self._processes:
                if not process.running():
                    self._on_death(process)
                    return


if __name__ == "__main__":
    main()
