"""A process says what it does while its main thread is blocked, or holds Python's lock."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.diagnosis.process_status import ProcessStatus, process_state, query_status
from tests.other_user import NOBODY, as_user, needs_root
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import time\nfrom slime.diagnosis.process_status import serve_status, in_phase\nserve_status()\n"
    "def up(): print('up', flush=True)\n"
)


@pytest.fixture
def child():
    started = []

    def start(body: str, before: str = "") -> int:
        code = before + _START + body
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def ask_until(pid: int, looked_for, **options):
    """A process gets on a little after it is up; what it says once it is there, or in the end."""
    deadline = time.monotonic() + 60
    while True:
        said = query_status(pid, **options)
        if looked_for(said) or time.monotonic() > deadline:
            return said


def wait_for_state(pid: int, letter: str) -> None:
    """A signal has its effect a moment later."""
    wait_for(lambda: process_state(pid) == letter)


def test_a_sleeping_process_tells_phase_and_stack(child):
    pid = child(
        "def nap():\n up(); time.sleep(60)\nwith in_phase('train'), in_phase('train/steps'):\n nap()"
    )
    said = ask_until(pid, lambda said: "in nap']" in str(said))
    assert isinstance(said, ProcessStatus) and said.pid == pid
    (work,) = said.work
    assert [what for what, _ in work.phases] == ["train", "train/steps"]
    assert work.stack[-1].endswith("in nap")


def test_a_phase_that_is_over_is_not_reported(child):
    said = query_status(child("with in_phase('train'):\n pass\nup(); time.sleep(60)"))
    assert isinstance(said, ProcessStatus) and said.work == []


@pytest.mark.parametrize("python", ["", "import os\ndel os.memfd_create\n"], ids=["", "conda"])
def test_one_that_holds_the_lock_still_shows_its_stack(child, python):
    stuck = "import re\ndef stuck():\n up(); re.match('(a+)+$', 'a' * 60 + 'b')\nstuck()"
    pid = child(stuck, before=python)
    said = ask_until(pid, lambda said: isinstance(said, str) and "in stuck" in said, timeout_s=0.3)
    assert isinstance(said, str) and said.startswith("does not answer") and "in stuck" in said


def test_a_stopped_and_an_ended_process(child):
    pid = child("up(); time.sleep(60)")
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
    assert query_status(pid) == f"is stopped (kill -CONT {pid} continues it)"
    os.kill(pid, signal.SIGKILL)
    wait_for_state(pid, "Z")
    assert query_status(pid) == "has ended"


_LATE = (
    "import sys\nfrom slime.diagnosis.process_status import serve_status\nprint('here', flush=True)\n"
    "sys.stdin.readline()\nserve_status()\nprint('up', flush=True)\nsys.stdin.readline()\n"
)


@needs_root
@pytest.mark.parametrize("forged", [b'{"pid": 1, "work": [], "groups": []}', b"x" * 2**16])
def test_a_socket_that_another_user_has_taken(forged):
    """The process starts all the same, and what the other user sends is not believed."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LATE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    attacker = os.fork()
    if attacker == 0:
        as_user(NOBODY, _impersonate, process.pid, forged)
        os._exit(0)
    try:
        wait_for(lambda: f"@slime-status-{process.pid}" in Path("/proc/net/unix").read_text())
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        said = query_status(process.pid, timeout_s=5)
        assert isinstance(said, str) and said.startswith("does not answer")
    finally:
        process.kill()
        process.wait()
        os.waitpid(attacker, 0)


def _impersonate(pid: int, forged: bytes) -> None:
    """Answer one question in the place of the process, without end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0slime-status-{pid}")
        listener.listen(1)
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for _ in range(200):
                connection.sendall(forged)


def test_an_answer_that_does_not_end_is_given_up(child):
    """Also of a process of the same user."""
    body = (
        "import socket, os, threading\nfrom slime.diagnosis import process_status\n"
        "process_status.snapshot = lambda: process_status.ProcessStatus(pid=1, groups=[], work=[process_status.BusyThread("
        "phases=[], stack=['x' * 2**23])])\nup(); time.sleep(60)"
    )
    said = query_status(child(body))
    assert isinstance(said, str) and said.startswith("does not answer")
