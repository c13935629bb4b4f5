"""A process says what it does while its main thread is blocked, or holds Python's lock."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.utils.whereabouts import Whereabouts, ask, process_state
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import time\nfrom slime.utils.whereabouts import answer_questions, doing\nanswer_questions()\n"
    "def up(): print('up', flush=True)\n"
)


@pytest.fixture
def child():
    started = []

    def start(body: str) -> int:
        code = _START + body
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
        said = ask(pid, **options)
        if looked_for(said) or time.monotonic() > deadline:
            return said


def wait_for_state(pid: int, letter: str) -> None:
    """A signal has its effect a moment later."""
    wait_for(lambda: process_state(pid) == letter)


def test_a_sleeping_process_tells_phase_and_stack(child):
    pid = child(
        "def nap():\n up(); time.sleep(60)\nwith doing('train'), doing('train/steps'):\n nap()"
    )
    said = ask_until(pid, lambda said: "in nap'" in str(said))
    assert isinstance(said, Whereabouts) and said.pid == pid
    (work,) = said.work
    assert [what for what, _ in work.phases] == ["train", "train/steps"]
    assert work.stack[-1].endswith("in nap")


def test_a_phase_that_is_over_is_not_told(child):
    said = ask(child("with doing('train'):\n pass\nup(); time.sleep(60)"))
    assert isinstance(said, Whereabouts) and said.work == []


def test_one_that_holds_the_lock_still_shows_its_stack(child):
    pid = child("import re\ndef stuck():\n up(); re.match('(a+)+$', 'a' * 60 + 'b')\nstuck()")
    said = ask_until(pid, lambda said: isinstance(said, str) and "in stuck" in said, timeout_s=0.3)
    assert isinstance(said, str) and said.startswith("does not answer") and "in stuck" in said


def test_a_stopped_and_an_ended_process(child):
    pid = child("up(); time.sleep(60)")
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
    assert ask(pid) == f"is stopped (kill -CONT {pid} lets it go on)"
    os.kill(pid, signal.SIGKILL)
    wait_for_state(pid, "Z")
    assert ask(pid) == "has ended"
