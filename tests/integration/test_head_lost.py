"""A driver that is gone without a word, and a process whose Ray head is: both end, and it is said why."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

# A driver that Ray, or somebody else, ends on the spot; its facts and its end are the arguments.
DRIVER = """
import json, os, subprocess, sys, time
from slime.diagnosis.run_monitor import RunFacts, RunMonitor
from slime.diagnosis.ray_processes import identify
known = json.loads(sys.argv[1])
children = [subprocess.Popen(["sleep", "60"]) for _ in known["own_ray"]]
known["own_ray"] = [identify(n, c.pid) for n, c in zip(known["own_ray"], children)]
facts = RunFacts(pid=os.getpid(), host="10.0.0.9", **known)
monitor = RunMonitor(facts)
if sys.argv[2] == "bye":
    monitor.dismiss()
elif sys.argv[2]:
    time.sleep(1.0)
    children[int(sys.argv[2])].kill()
    time.sleep(8.0)  # a monitor on busy cores starts late, and must see it before the driver is gone
for child in children:
    child.kill()
os._exit(1)
"""
WATCHED = """
import sys, threading, time
from slime.diagnosis.run_monitor import HeadWatch
watch = HeadWatch(sys.argv[1])
if sys.argv[2] == "stop":
    watch.stop()
    for thread in threading.enumerate():
        if thread.name == "head-watch":
            thread.join()
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def head():
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nobody():
    """An address at which nobody listens, nor can: it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def raylet(tmp_path):
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        yield path


def words_of(tmp_path: Path, how: str = "", **facts: object) -> str:
    """What is said when a driver ends, by it or for it."""
    known = {"own_ray": [], "save": str(tmp_path / "saved"), "load": None, **facts}
    return _python(DRIVER, json.dumps(known), how).stderr


def test_goodbye_is_silent(tmp_path, nobody, raylet):
    assert words_of(tmp_path, "bye", head=nobody, raylet=raylet) == ""


def test_the_head_is_named_and_the_checkpoint(tmp_path, nobody, raylet):
    checkpoint = tmp_path / "saved" / "iter_0000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text("{}")
    said = words_of(tmp_path, head=nobody, raylet=raylet)
    assert said.startswith(
        f"slime: Ray's head at {nobody} died or cannot be reached, and the driver"
    )
    assert "on 10.0.0.9) ended with it" in said
    assert f"The checkpoint after rollout 7 is in {tmp_path / 'saved'}: continue with" in said
    assert f"ray start --address={nobody}" in said


def test_the_raylet_is_named(tmp_path, head):
    said = words_of(tmp_path, head=head, raylet=str(tmp_path / "nothing"))
    assert "Ray's raylet on this node died" in said and "Nothing had been saved yet" in said


def test_a_killed_driver(tmp_path, head, raylet):
    said = words_of(tmp_path, head=head, raylet=raylet, save=None)
    assert "was killed" in said and "--save was not given" in said


@pytest.mark.parametrize(("dead", "title"), [("0", "Ray's GCS"), ("1", "Ray's raylet")])
def test_the_process_of_an_own_ray_that_died_first_is_named(tmp_path, nobody, dead, title):
    own = {"own_ray": ["gcs_server", "raylet"], "head": nobody, "raylet": "/nothing"}
    said = words_of(tmp_path, dead, **own)
    assert said.startswith(f"slime: {title} on this machine (pid ")
    assert "memory" not in said and "Nothing had been saved yet" in said


def test_a_killed_driver_with_an_own_ray(tmp_path, nobody):
    own = {"own_ray": ["gcs_server", "raylet"], "head": nobody, "raylet": "/nothing"}
    said = words_of(tmp_path, **own)
    assert "was killed: by hand, or for lack of memory" in said and "Ray" not in said


def test_a_process_ends_with_its_head(nobody):
    assert _watch(nobody, "", "150") == 1


def test_a_process_goes_on_with_its_head(head):
    assert _watch(head, "", "2") == 0


def test_a_process_goes_on_unwatched(nobody):
    """The watch ends at once, and not the process with it when the head's time is over."""
    assert _watch(nobody, "stop", "0", patience_s=20) == 0


def _watch(*words: str, patience_s: float = 0.6) -> int:
    return _python(WATCHED, *words, patience_s=patience_s).returncode


def _python(program: str, *words: str, patience_s: float = 0.6) -> subprocess.CompletedProcess[str]:
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(patience_s)}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **patience}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
