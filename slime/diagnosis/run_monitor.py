"""Prints the exit reason of a driver that could not print it itself: it was killed, or ended by Ray.

    driver ──pipe──▶ monitor (a process of its own, standard library only)
       "bye"           the run reports its end itself: the monitor prints nothing
       end of file     the driver is gone: the monitor prints why, and how to resume, to stderr

Ray ends a driver without an exception once its node's raylet is gone, or the head has not answered for
RAY_gcs_rpc_server_reconnect_timeout_s; head_watch.py does the same where Ray notices nothing. Where the run
started Ray itself, its processes end with the driver, so the monitor polls them while the driver lives: the
one that was gone before the driver is the reason.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.config.env import child_env, read_env
from slime.diagnosis.head_watch import answers
from slime.diagnosis.ray_processes import RayProcess, identify
from slime.runlog.checkpoint_folder import how_to_continue

_BYE = b"bye\n"
_SHOW_CURSOR = "\x1b[?25h"  # hidden by the driver's live display
_PROBES = 3  # one that fails means that the head is going away
_POLL_S = 0.1
_ROOT = Path(__file__).resolve().parents[2]
TITLES = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the monitor knows about the run."""

    pid: int  # of the driver
    host: str  # its address
    head: str  # address of Ray's head, HOST:PORT
    raylet: str  # socket of the raylet on the driver's node
    own_ray: list[RayProcess]  # of the Ray that this process started; empty on a cluster
    save: str | None
    load: str | None


class RunMonitor:
    def __init__(self, facts: RunFacts):
        paths = [str(_ROOT), read_env().python_path]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "slime.diagnosis.run_monitor", json.dumps(asdict(facts))],
            stdin=subprocess.PIPE,
            env=child_env(PYTHONPATH=os.pathsep.join(path for path in paths if path)),
            start_new_session=True,  # signals to the driver's process group must not reach it
        )

    def dismiss(self) -> None:
        """End the monitor without a message: the run reports its end itself."""
        with suppress(BrokenPipeError):
            self._process.communicate(_BYE)


def died(process: RayProcess) -> str:
    """Return the beginning of a sentence about a process of this run's own Ray."""
    title = TITLES.get(process.name, f"Ray's {process.name}")
    return f"{title} on this machine (pid {process.pid}) died"


def exit_reason(facts: RunFacts, first: RayProcess | None) -> str:
    """Return why the driver is gone, as far as can be seen from outside, and how to resume.

    `first` is the process of the run's own Ray that was gone before the driver.
    """
    driver = f"the driver (pid {facts.pid} on {facts.host})"
    advice = how_to_continue(facts.save, facts.load)
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
    for attempt in range(_PROBES):
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it exits when the driver does
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
    """Return the driver's message once it closes the pipe, and the process of Ray's that was gone before.

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


if __name__ == "__main__":
    main()
