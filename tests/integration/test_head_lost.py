"""A driver that died silently, and a process whose Ray head died: both end, and the reason is printed."""

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


def messages_of(tmp_path: Path, how: str = "", **facts: object) -> str:
    """Return what is printed when a driver ends, by itself or by its monitor."""
    known = {"own_ray": [], "save": str(tmp_path / "saved"), "load": None, **facts}
    return _python(DRIVER, json.dumps(known), how).stderr


def test_goodbye_is_silent(tmp_path, nobody, raylet):
    assert messages_of(tmp_path, "bye", head=nobody, raylet=raylet) == ""


def test_the_head_is_named_and_the_checkpoint(tmp_path, nobody, raylet):
    checkpoint = tmp_path / "saved" / "iter_0000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text("{}")
    printed = messages_of(tmp_path, head=nobody, raylet=raylet)
    assert printed.startswith(
        f"slime: Ray's head at {nobody} died or cannot be reached, and the driver"
    )
    assert "on 10.0.0.9) ended with it" in printed
    assert f"The checkpoint after rollout 7 is in {tmp_path / 'saved'}: continue with" in printed
    assert f"ray start --address={nobody}" in printed


def test_the_raylet_is_named(tmp_path, head):
    printed = messages_of(tmp_path, head=head, raylet=str(tmp_path / "nothing"))
    assert "Ray's raylet on this node died" in printed and "Nothing had been saved yet" in printed


def test_a_killed_driver(tmp_path, head, raylet):
    printed = messages_of(tmp_path, head=head, raylet=raylet, save=None)
    assert "was killed" in printed and "--save was not given" in printed


@pytest.mark.parametrize(("dead", "title"), [("0", "Ray's GCS"), ("1", "Ray's raylet")])
def test_the_process_of_an_own_ray_that_died_first_is_named(tmp_path, nobody, dead, title):
    own = {"own_ray": ["gcs_server", "raylet"], "head": nobody, "raylet": "/nothing"}
    printed = messages_of(tmp_path, dead, **own)
    assert printed.startswith(f"slime: {title} on this machine (pid ")
    assert "memory" not in printed and "Nothing had been saved yet" in printed


def test_a_killed_driver_with_an_own_ray(tmp_path, nobody):
    own = {"own_ray": ["gcs_server", "raylet"], "head": nobody, "raylet": "/nothing"}
    printed = messages_of(tmp_path, **own)
    assert "was killed: by hand, or for lack of memory" in printed and "Ray" not in printed


def test_a_process_ends_with_its_head(nobody):
    assert _watch(nobody, "", "150") == 1


def test_a_process_goes_on_with_its_head(head):
    assert _watch(head, "", "2") == 0


def test_a_process_goes_on_unwatched(nobody):
    """The watch ends at once, and the process survives the timeout of the head."""
    assert _watch(nobody, "stop", "0", timeout_s=20) == 0


def _watch(*words: str, timeout_s: float = 0.6) -> int:
    return _python(WATCHED, *words, timeout_s=timeout_s).returncode


def _python(program: str, *words: str, timeout_s: float = 0.6) -> subprocess.CompletedProcess[str]:
    timeout = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(timeout_s)}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **timeout}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
