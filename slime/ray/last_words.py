"""Says how a run ended that could not say it itself: its driver was killed, or ended by Ray.

    driver ──pipe──▶ witness (a process of its own, standard library only)
       "bye"           ends silently
       end of file     the driver is gone without a word: why, and how to continue, on stderr

Ray ends a driver without raising anything once its node's raylet is gone, or the head has not answered for
RAY_gcs_rpc_server_reconnect_timeout_s; head_watch.py does the same where Ray notices nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from slime.ray.head_watch import answers
from slime.utils.checkpoint import how_to_continue
from slime.utils.env import child_env, read_env

_BYE = b"bye\n"
_SHOW_CURSOR = "\x1b[?25h"  # which the driver's live display had hidden
_KNOCKS = 3  # of which one that fails says that the head is going
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the witness knows of the run."""

    pid: int  # of the driver
    host: str  # its address
    head: str  # address of Ray's head, HOST:PORT
    raylet: str  # socket of the raylet on the driver's node
    owns_ray: bool  # whether the run started Ray itself
    save: str | None
    load: str | None


class Witness:
    def __init__(self, subject: Subject):
        paths = [str(_ROOT), read_env().python_path]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "slime.ray.last_words", json.dumps(asdict(subject))],
            stdin=subprocess.PIPE,
            env=child_env(PYTHONPATH=os.pathsep.join(path for path in paths if path)),
            start_new_session=True,  # what ends the driver's process group must not end it too
        )

    def dismiss(self) -> None:
        """The run ends in its own words."""
        with suppress(BrokenPipeError):
            self._process.communicate(_BYE)


def testimony(subject: Subject) -> str:
    """Why the driver is gone, as far as can be seen from outside, and how to continue."""
    where = f"the driver (pid {subject.pid} on {subject.host})"
    advice = how_to_continue(subject.save, subject.load)
    if subject.owns_ray:  # whose processes end with the driver's
        what = f"{where} was killed, or ended by Ray: perhaps for lack of memory (dmesg)."
        return f"{what}\n{advice}"
    if not _head_answers(subject.head):
        what = f"Ray's head at {subject.head} died or cannot be reached, and {where} ended with it."
        host, _, port = subject.head.rpartition(":")
        again = f"ray start --head --node-ip-address={host} --port={port}"
        return (
            f"{what} What runs on other nodes ends by itself within minutes.\n{advice}\nStart Ray again "
            f"first: {again}, and ray start --address={subject.head} on the other nodes."
        )
    if not _raylet_answers(subject.raylet):
        return f"Ray's raylet on this node died, and {where} with it.\n{advice}"
    return f"{where} was killed: by hand, or for lack of memory (dmesg).\n{advice}"


def _head_answers(address: str) -> bool:
    for attempt in range(_KNOCKS):
        time.sleep(1.0 if attempt else 0)
        if not answers(address):
            return False
    return True


def _raylet_answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as knock:
        try:
            knock.connect(path)
        except OSError:
            return False
    return True


def main() -> None:
    heard = sys.stdin.buffer.read()
    if heard != _BYE:
        if sys.stderr.isatty():
            print(_SHOW_CURSOR, end="", file=sys.stderr)
        print(f"slime: {testimony(Subject(**json.loads(sys.argv[1])))}", file=sys.stderr)


if __name__ == "__main__":
    main()
