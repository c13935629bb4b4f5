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

# A driver that Ray, or somebody else, ends on the spot; its subject and its end are the arguments.
DRIVER = """
import json, os, sys
from slime.ray.last_words import Subject, Witness
subject = Subject(pid=os.getpid(), host="10.0.0.9", **json.loads(sys.argv[1]))
witness = Witness(subject)
if sys.argv[2] == "bye":
    witness.dismiss()
os._exit(1)
"""
WATCHED = """
import sys, time
from slime.ray.head_watch import HeadWatch
watch = HeadWatch(sys.argv[1])
if sys.argv[2] == "stop":
    watch.stop()
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def head():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def raylet(tmp_path):
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        yield path


def words_of(tmp_path: Path, how: str = "", **subject: object) -> str:
    """What is said when a driver ends, by it or for it."""
    known = {"owns_ray": False, "save": str(tmp_path / "saved"), "load": None, **subject}
    return _python(DRIVER, json.dumps(known), how).stderr


def test_goodbye_is_silent(tmp_path, raylet):
    assert words_of(tmp_path, "bye", head=nobody(), raylet=raylet) == ""


def test_the_head_is_named_and_the_checkpoint(tmp_path, raylet):
    checkpoint = tmp_path / "saved" / "iter_0000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text("{}")
    gone = nobody()
    said = words_of(tmp_path, head=gone, raylet=raylet)
    assert said.startswith(f"slime: Ray's head at {gone} died or cannot be reached, and the driver")
    assert "on 10.0.0.9) ended with it" in said
    assert f"The checkpoint after rollout 7 is in {tmp_path / 'saved'}: continue with" in said
    assert f"ray start --address={gone}" in said


def test_the_raylet_is_named(tmp_path, head):
    said = words_of(tmp_path, head=head, raylet=str(tmp_path / "nothing"))
    assert "Ray's raylet on this node died" in said and "Nothing had been saved yet" in said


def test_a_killed_driver(tmp_path, head, raylet):
    said = words_of(tmp_path, head=head, raylet=raylet, save=None)
    assert "was killed" in said and "--save was not given" in said


def test_a_process_ends_with_its_head():
    assert _watch(nobody(), "", "60") == 1


@pytest.mark.parametrize("stop", ["stop", ""])
def test_a_process_goes_on_with_its_head_or_unwatched(head, stop):
    assert _watch(nobody() if stop else head, stop, "2") == 0


def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def _watch(*words: str) -> int:
    return _python(WATCHED, *words).returncode


def _python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_gcs_rpc_server_reconnect_timeout_s": "0.6"}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
