"""A run's own Ray: out of reach of signals to the driver's group, gone with the driver, named when it dies."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e import gates, runs


class Held:
    """A run that waits in the generation of a rollout, and all processes it has started."""

    def __init__(self, model, data, folder: Path):
        self.save = folder / "checkpoints"
        options = {"num_rollout": 4, "save": self.save, "load": self.save}
        hold = {"custom_generate_function_path": gates.GENERATE}
        self.run_dir = folder / "run"
        words = runs.command(model, data, self.run_dir, **options, **hold)
        self.process = runs.start(words, forked=False)
        self.gate = gates.Gate(self.run_dir)
        self.gate.wait(self.process)
        self.driver = psutil.Process(self.process.pid)
        self.started = self.driver.children(recursive=True)
        self.ray_folder = _ray_folder(self.started)

    def pid_of(self, name: str) -> int:
        return next(process.pid for process in self.started if process.name() == name)

    def saved(self) -> int:
        return int((self.save / "latest_checkpointed_iteration.txt").read_text())

    def check_nothing_is_left(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for process in self.started:
            runs.wait_until_gone(process, max(0.1, deadline - time.monotonic()))
        while self.ray_folder.exists():
            assert time.monotonic() < deadline, f"{self.ray_folder} is left"
            time.sleep(0.05)


def _ray_folder(processes: list[psutil.Process]) -> Path:
    """The private folder of the run's own Ray, from its keeper's command line."""
    lines = [process.cmdline() for process in processes]
    return Path(next(words[-1] for words in lines if "slime.diagnosis.ray_processes" in words))


@pytest.fixture
def held(tiny_model, tiny_data, tmp_path):
    run = Held(tiny_model, tiny_data, tmp_path)
    yield run
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.communicate(timeout=60)


def test_sigterm_to_the_process_group_saves(held):
    """As GNU timeout and batch systems send it."""
    began = time.monotonic()
    os.killpg(held.process.pid, signal.SIGTERM)
    output = runs.finish(held.process, timeout=90)
    assert held.process.returncode == 128 + signal.SIGTERM, output
    assert held.saved() == gates.HELD - 1, output
    assert (held.run_dir / "report.html").exists()
    assert "died" not in output and "killed" not in output and "lack of memory" not in output
    assert time.monotonic() - began < 40, output
    held.check_nothing_is_left(within_s=1)


def test_ctrl_c_twice_does_not_speak_of_memory(held):
    os.killpg(held.process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(held.process.pid, signal.SIGINT)
    output = runs.finish(held.process, timeout=90)
    assert held.process.returncode == 128 + signal.SIGINT, output
    assert "memory" not in output and "killed" not in output, output
    held.check_nothing_is_left(within_s=10)


@pytest.mark.parametrize("group", [False, True], ids=["alone", "group"])
def test_nothing_outlives_a_killed_driver(held, group):
    os.killpg(held.process.pid, signal.SIGKILL) if group else held.process.kill()
    held.check_nothing_is_left(within_s=10)
    output = runs.finish(held.process, timeout=60)
    assert f"the driver (pid {held.process.pid} on 127.0.0.1) was killed" in output
    assert "Nothing had been saved yet" in output


def test_a_killed_gcs_is_named_and_the_work_saved(held):
    began, pid = time.monotonic(), held.pid_of("gcs_server")
    os.kill(pid, signal.SIGKILL)
    output = runs.finish(held.process, timeout=90)
    assert held.process.returncode == 1, output
    assert time.monotonic() - began < 30, output
    assert f"slime: Ray's GCS on this machine (pid {pid}) died" in output
    assert held.saved() == gates.HELD - 1, output
    assert f"The checkpoint after rollout {gates.HELD - 1} is in {held.save}" in output
    assert not re.search(r"memory|trainer|manager|raylet|\x1b", output.split("died", 1)[1]), output
    assert (held.run_dir / "report.html").exists()
    held.check_nothing_is_left(within_s=10)


def test_a_killed_raylet_is_named(held):
    began, pid = time.monotonic(), held.pid_of("raylet")
    os.kill(pid, signal.SIGKILL)
    output = runs.finish(held.process, timeout=90)
    assert held.process.returncode == 1, output
    assert time.monotonic() - began < 30, output
    assert output.count(f"slime: Ray's raylet on this machine (pid {pid}) died") == 1, output
    assert re.search("the same command (starts over|continues)", output)  # a save may be in time
    assert not re.search(r"rank|manager|unavailable|\x1b", output), output
    held.check_nothing_is_left(within_s=10)
