"""Ray's head dies during a run: the error names it, no process is left over, and the run continues with a new head."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import psutil
import pytest

from tests.cluster.ray_cluster import RECONNECT_S
from tests.cluster.task import wait_for_rollout
from tests.e2e import runs

EXIT_TIMEOUT_S = RECONNECT_S + 60  # Ray's reconnect timeout, and busy cores
GONE_S = 2 * RECONNECT_S + 90  # the agents of a node probe the head once more
# Processes of the run: driver, monitor, actors, engine.
OF_RUN = ("train_there", "run_monitor", "_Host", "slime.engine.server")


@pytest.fixture
def start(cluster, task, tmp_path):
    """Start the run on a host from its last checkpoint; every start has its own folder."""
    started = []

    def begin(host, name: str, **overrides):
        words = task.command(
            tmp_path / name, **{"save": tmp_path / "saved", "save_interval": 1, **overrides}
        )
        command = [sys.executable, "-m", "tests.cluster.train_there", host.address, *words]
        process = cluster.popen(host, command, RAY_ADDRESS=cluster.address)
        started.append(process)
        wait_for_rollout(tmp_path / name, process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    cluster.restart()


@pytest.mark.timeout(1500)  # two whole runs, two clusters
def test_a_run_outlives_two_heads(cluster, start, tmp_path):
    """First the head's GCS is killed, with the driver beside it; then the whole host, with the driver on another."""
    process = start(cluster.head, "first", num_rollout=2000)
    (gcs,) = cluster.pids(cluster.head, "gcs/gcs_server")
    os.kill(gcs, signal.SIGKILL)
    last = _check_exit_message(process, cluster, tmp_path, driver=cluster.head)
    _check_nothing_left(cluster)

    cluster.restart()
    other = cluster.network.hosts[1]
    process = start(other, "second", num_rollout=2000, load=tmp_path / "saved")
    first = runs.metrics(tmp_path / "second", "train")[0]["rollout_id"]
    assert first == last + 1
    cluster.network.cut(cluster.head)
    cluster.end(cluster.pids(cluster.head, ""))
    assert _check_exit_message(process, cluster, tmp_path, driver=other) >= first
    _check_nothing_left(cluster, *OF_RUN)  # Ray's own processes take minutes


def _check_exit_message(process, cluster, tmp_path, *, driver) -> int:
    """Check the printed exit message; return the rollout of the checkpoint that it names."""
    output, _ = process.communicate(timeout=EXIT_TIMEOUT_S)
    assert process.returncode not in (0, None), output
    assert "Traceback" not in output, output
    (message,) = re.findall(r"^slime: .*(?:\n.*)*", output, re.M)
    assert message.startswith(
        f"slime: Ray's head at {cluster.address} died or cannot be reached"
    ), message
    assert re.search(
        rf"the driver \(pid \d+ on {re.escape(driver.address)}\) ended with it", message
    )
    assert f"ray start --address={cluster.address}" in message
    match = re.search(r"The checkpoint after rollout (\d+) is in (\S+): ", message)
    assert match and (tmp_path / "saved" / f"iter_{int(match[1]):07d}" / "meta.json").exists(), (
        message
    )
    return int(match[1])


def _check_nothing_left(cluster, *patterns: str) -> None:
    """Ranks, engines and, without patterns, Ray itself exit on every host on their own."""
    deadline = time.monotonic() + GONE_S
    hosts = cluster.network.hosts
    while left := [
        pid for host in hosts for p in patterns or ("",) for pid in cluster.pids(host, p)
    ]:
        assert time.monotonic() < deadline, _command_lines(left)
        time.sleep(1)


def _command_lines(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            found.append(" ".join(psutil.Process(pid).cmdline())[:120])
        except psutil.Error:
            continue
    return found
