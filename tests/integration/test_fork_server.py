"""Processes that tests/fork_server.py forks behave as those that Python starts, and end with their clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import fork_server
from tests.e2e.runs import ROOT, environment, wait_until_gone

SCRIPT = """
import json, os, signal, subprocess, sys, time
facts = {"pid": os.getpid(), "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[:2],
         "imported": "torch" in sys.modules, "variables": dict(os.environ),
         "executable": sys.executable, "name": __name__, "umask": os.umask(0)}
print(json.dumps(facts), flush=True)
what = sys.argv[1]
if what == "read":
    print(sys.stdin.read().upper(), file=sys.stderr)
    os.write(int(sys.argv[2]), b"through a pipe")
elif what == "exit":
    import atexit
    atexit.register(print, "at exit")
    sys.exit(7)
elif what == "abort":
    os.abort()
elif what == "raise":
    raise ValueError("of the script")
elif what == "terminated":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("ready", flush=True)
    time.sleep(600)
elif what == "sleep":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("scripts") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(params=["forked", "python"])
def python(request) -> str:
    return fork_server.client() if request.param == "forked" else sys.executable


def start(python: str, script: Path, *words: str, **options) -> subprocess.Popen[str]:
    options = {"env": {**environment(), **fork_server.variables()}, **options}
    pipes = {"stdin": -1, "stdout": -1, "stderr": -1}
    return subprocess.Popen([python, str(script), *words], text=True, **{**pipes, **options})


def test_it_has_what_its_client_was_given(python, script, tmp_path):
    reading, writing = os.pipe()
    process = start(python, script, "read", str(writing), pass_fds=[writing], cwd=tmp_path)
    os.close(writing)
    output, errors = process.communicate("given", timeout=60)
    assert (process.returncode, errors) == (0, "GIVEN\n")
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"through a pipe"
    facts = json.loads(output)
    assert facts["argv"] == [str(script), "read", str(writing)] and facts["name"] == "__main__"
    assert facts["cwd"] == str(tmp_path) and facts["path"] == [str(script.parent), str(ROOT)]
    wanted = {**environment(), **fork_server.variables()}
    assert wanted.items() <= facts["variables"].items()
    assert facts["executable"] == sys.executable and facts["umask"] == os.umask(facts["umask"])
    assert facts["imported"] == (python != sys.executable)


@pytest.mark.parametrize(
    ("how", "status", "printed"),
    [("exit", 7, "at exit"), ("abort", -signal.SIGABRT, ""), ("raise", 1, "ValueError: of the")],
)
def test_it_ends_as_its_script_does(python, script, how, status, printed):
    process = start(python, script, how, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert printed in output


def test_a_signal_reaches_it(python, script):
    process = start(python, script, "terminated")
    assert process.stdout is not None
    assert process.stdout.readline() and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(timeout=60) == 5
    process.communicate()


def test_it_is_killed_with_its_client(python, script):
    process = start(python, script, "sleep")
    assert process.stdout is not None
    own = psutil.Process(json.loads(process.stdout.readline())["pid"])
    process.kill()
    wait_until_gone(own)
    process.communicate(timeout=60)


def test_its_own_end_is_its_clients(script):
    process = start(fork_server.client(), script, "sleep")
    assert process.stdout is not None
    os.kill(json.loads(process.stdout.readline())["pid"], signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.communicate()


@pytest.mark.parametrize(
    "variables", [{"OMP_NUM_THREADS": "2"}, {"HF_HUB_OFFLINE": "0"}, {"LD_PRELOAD": ""}]
)
def test_variables_that_a_library_has_read_start_python(script, variables):
    env = {**environment(), **fork_server.variables(), **variables}
    process = start(fork_server.client(), script, "other", env=env)
    facts = json.loads(process.communicate(timeout=60)[0])
    assert not facts["imported"] and facts["pid"] == process.pid


def test_without_a_server_python_is_started(script):
    process = start(fork_server.client(), script, "other", env=environment())
    facts = json.loads(process.communicate(timeout=60)[0])
    assert not facts["imported"] and facts["pid"] == process.pid


def test_too_many_open_files_start_python(script):
    pipes = [os.pipe() for _ in range(120)]
    files = [number for pipe in pipes for number in pipe]
    process = start(fork_server.client(), script, "other", pass_fds=files)
    for number in files:
        os.close(number)
    facts = json.loads(process.communicate(timeout=60)[0])
    assert not facts["imported"] and facts["pid"] == process.pid


def test_another_program_is_started_by_python(tmp_path):
    path = tmp_path / "other.py"
    path.write_text(SCRIPT)
    process = start(fork_server.client(), path, "other")
    assert not json.loads(process.communicate(timeout=60)[0])["imported"]
