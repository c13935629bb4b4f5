"""What a model's program must not be able to do, tried as root and as another user."""

from __future__ import annotations

import time

import pytest

from slime.rollout.sandbox import run_python
from slime.utils.http import run
from tests.sandboxes import USERS, attack


def sandboxed(program, time_limit_s=30.0, **options):
    """Time enough for a busy machine, where time is not what is tested."""
    return run(run_python(program, time_limit_s=time_limit_s, **options))


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)"],
)
def test_time_is_limited_whatever_a_program_does(program):
    start = time.monotonic()
    assert not sandboxed(program, time_limit_s=2.0).ok
    assert time.monotonic() - start < 50


def test_a_traceback_names_no_random_folder():
    """It becomes part of the tokens that a model sees, which must not differ from run to run."""
    first, second = (sandboxed("import nothing_of_this_name").stderr for _ in range(2))
    assert first == second and "ModuleNotFoundError" in first


def test_memory_and_output_are_limited():
    done = sandboxed("x = bytearray(10 ** 9)", memory_bytes=200 << 20)
    assert "MemoryError" in done.stderr
    assert not sandboxed("while True: print('x' * 10000)").ok


@pytest.mark.parametrize("isolate", [True, False])
def test_programs_start_threads_but_no_processes(isolate):
    done = sandboxed("import os\nos.fork()", isolate=isolate)
    assert "PermissionError" in done.stderr
    done = sandboxed("import subprocess\nsubprocess.run(['true'])", isolate=isolate)
    assert "PermissionError" in done.stderr
    threads = "import threading\nt = threading.Thread(target=lambda: print(5))\nt.start(); t.join()"
    assert sandboxed(threads, isolate=isolate).stdout == "5\n"


def test_without_namespaces_the_limits_still_hold_if_the_user_says_so():
    assert run(run_python("print(3)", isolate=False)).stdout == "3\n"
    start = time.monotonic()
    assert not run(run_python("while True: pass", time_limit_s=1.0, isolate=False)).ok
    assert time.monotonic() - start < 60


@USERS
def test_programs_have_no_network(user):
    done = attack(user, "import socket; socket.socket()")
    assert "PermissionError" in done.stderr
