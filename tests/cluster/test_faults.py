"""Hosts that are cut off and processes that die: named in time, then recovered or stopped with advice.

The tests leave host 2 as they found it; they run after those that need all three, by their names.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from tests.cluster.ray_cluster import ROOT
from tests.cluster.task import wait_for_rollout
from tests.e2e import runs

TRAIN = str(ROOT / "train.py")
SLOW = "tests.e2e.stall_hooks.slow_reward"  # most of the time goes into generation
NAMED_S = 150  # Ray's own checks of a silent node, on busy cores


@pytest.fixture
def run(cluster, task, tmp_path):
    """A run in the middle of its rollouts, ended with the test."""
    cluster.settle()
    started = []

    def start(**overrides):
        words = task.command(
            tmp_path / "run",
            **{
                "num_rollout": 2000,
                "save": tmp_path / "saved",
                "save_interval": 1,
                "rollout_data_postprocess_path": "tests.e2e.stall_hooks.tell_pid",
                "rollout_health_check_interval": 2,
                "rollout_health_check_timeout": 10,
                **overrides,
            },
        )
        process = cluster.popen(
            cluster.head, [sys.executable, TRAIN, *words], RAY_ADDRESS=cluster.address
        )
        started.append(process)
        wait_for_rollout(tmp_path / "run", process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_dead_engine_is_replaced_and_a_dead_rank_is_named(run, tmp_path):
    process = run(custom_rm_path=SLOW)
    port_file = tmp_path / "run" / "logs" / "engine_0.port"
    first = json.loads(port_file.read_text())["pid"]
    os.kill(first, signal.SIGKILL)
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"

    def moved_on() -> bool:
        return port_file.exists() and json.loads(port_file.read_text() or "{}").get("pid") != first

    runs.wait_for(moved_on, process)
    since = int(tracker.read_text())
    runs.wait_for(lambda: int(tracker.read_text()) > since + 1, process)
    pid = int((tmp_path / "run" / "rank_3.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    output = _ended(process)
    assert "engine 0 failed and was started again" in output
    _check_named("trainer rank 3", pid, output)
    _check_advice(output, tmp_path)


def test_a_dead_rollout_manager_is_named(run, cluster, tmp_path):
    process = run()
    pid = _rollout_manager(cluster, tmp_path)
    os.kill(pid, signal.SIGKILL)
    output = _ended(process)
    _check_named("rollout manager", pid, output)
    _check_advice(output, tmp_path)


def test_a_dead_raylet_takes_its_ranks_along(run, cluster, tmp_path):
    process = run()
    host = _host_of_rank(cluster, tmp_path, 3)
    (raylet,) = cluster.pids(host, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    output = _ended(process)
    assert re.search(rf"slime: trainer rank [23] \(pid \d+ on {host.address}\) died", output), (
        output
    )
    _check_advice(output, tmp_path)
    cluster.rejoin(host)


def test_a_host_that_is_cut_off(run, cluster, tmp_path):
    """Packets vanish in the middle of training: no connection is closed, nobody says goodbye."""
    process = run()
    host = _host_of_rank(cluster, tmp_path, 3)
    began = time.monotonic()
    cluster.network.cut(host)
    try:
        output = _ended(process)
    finally:
        cluster.network.restore(host)
        cluster.rejoin(host)
    assert time.monotonic() - began < NAMED_S
    assert re.search(rf"slime: trainer rank [23] \(pid \d+ on {host.address}\) died", output), (
        output
    )
    _check_advice(output, tmp_path)


def test_the_engines_host_is_cut_off(run, cluster, tmp_path):
    """No other host has room for it: the run saves, and ends with how to continue."""
    host = cluster.network.hosts[-1]
    cluster.other_slots[host.address] = 1  # of hosts alike Ray may choose the head's for the engine
    cluster.rejoin(host)
    cluster.settle()
    process = run(rollout_no_engine_timeout=20, custom_rm_path=SLOW)
    log = (tmp_path / "run" / "logs" / "engine_0.log").read_text()
    assert f"engine ready at http://{host.address}:" in log
    cluster.network.cut(host)
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        cluster.network.restore(host)
        cluster.other_slots.clear()
        cluster.rejoin(host)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert "engine 0 failed and could not be started again so far: no node had resources" in output
    last = int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text())
    trained = [record["rollout_id"] for record in runs.metrics(tmp_path / "run", "train")]
    assert last == max(trained)
    _check_advice(output, tmp_path)


def _ended(process) -> str:
    output, _ = process.communicate(timeout=NAMED_S + 60)
    assert process.returncode == 1, output
    assert "Traceback" not in output, output
    return output


def _check_named(label: str, pid: int, output: str) -> None:
    assert re.search(rf"slime: {label} \(pid {pid} on 10\.77\.0\.\d\) died", output), output


def _check_advice(output: str, tmp_path) -> None:
    match = re.search(r"The checkpoint after rollout (\d+) is in (\S+): continue with", output)
    assert match, output
    assert (tmp_path / "saved" / f"iter_{int(match[1]):07d}").is_dir()
    assert f"--load {tmp_path / 'saved'}" in output


def _host_of_rank(cluster, tmp_path, rank: int):
    pid = int((tmp_path / "run" / f"rank_{rank}.pid").read_text())
    (host,) = (host for host in cluster.network.hosts if pid in cluster.pids(host, ""))
    assert host is not cluster.head, "the driver's own host"
    return host


def _rollout_manager(cluster, tmp_path) -> int:
    """The process on the head that has the file of its records open."""
    log = str(tmp_path / "run" / "logs" / "rollout.log")
    for pid in cluster.pids(cluster.head, "ray::"):
        folder = f"/proc/{pid}/fd"
        links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
        if log in links:
            return pid
    raise AssertionError("there is no rollout manager")
