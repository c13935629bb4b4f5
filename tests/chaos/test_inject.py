"""Faults do what they say, to the files and processes they name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from tests.chaos import inject
from tests.chaos.modes import MODES, Folders
from tests.chaos.plan import DAMAGE, Fault, Moment
from tests.chaos.processes import MARKER, Processes

NOW = Moment(phase="early", rollout=0, delay_s=0.0, fraction=0.0)


@pytest.fixture
def checkpoints(tmp_path):
    for number in (1, 3):
        folder = tmp_path / f"iter_{number:07d}"
        folder.mkdir()
        (folder / "meta.json").write_text('{"rollout_id": 3}')
        (folder / "rollout.json").write_text('{"epoch": 0}')
        (folder / "__0_0.distcp").write_bytes(os.urandom(100_000))
        (folder / "trainer.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    return tmp_path


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_changes_one_file_of_the_newest_checkpoint(checkpoints, kind):
    before = contents(checkpoints)
    words = inject.damage(checkpoints, kind)
    after = contents(checkpoints)
    changed = [name for name in before if after.get(name) != before[name]]
    how, what = kind.split("_")
    expected = {
        "data": "iter_0000003/__0_0.distcp",
        "meta": "iter_0000003/meta.json",
        "rollout": "iter_0000003/rollout.json",
        "tracker": "latest_checkpointed_iteration.txt",
    }[what]
    assert changed == [expected] and words == f"{how} {expected}"
    assert (expected in after) == (how != "delete")
    if how in ("flip", "zero", "garble"):
        assert len(after[expected]) == len(before[expected])


def test_damage_to_the_only_checkpoint_is_named(tmp_path):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"weights")
    assert inject.damage(tmp_path, "delete_data").endswith(inject.ONLY_CHECKPOINT)


def test_without_a_checkpoint_there_is_nothing_to_damage(tmp_path):
    assert inject.damage(tmp_path, "flip_data") is None


@pytest.fixture
def start(tmp_path):
    """A sleeping program as the driver of a start."""
    marker = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, MARKER: marker},
        start_new_session=True,
    )
    folders = Folders(root=tmp_path)
    folders.disk.mkdir()
    yield inject.Start(
        mode=MODES["sync1"],
        folders=folders,
        pid=process.pid,
        began=time.monotonic(),
        loop_s=1.0,
        processes=Processes(marker),
        ended=lambda: process.poll() is not None,
    )
    process.kill()
    process.wait()


def test_a_stopped_process_goes_on_after_its_time(start):
    fault = Fault(kind="stop", target="driver", at=NOW, seconds=0.5)
    assert inject.inject(fault, start) == f"SIGSTOP to driver (pid {start.pid})"
    driver = psutil.Process(start.pid)
    wait_until(lambda: driver.status() == psutil.STATUS_STOPPED)
    wait_until(lambda: driver.status() != psutil.STATUS_STOPPED)


def test_the_group_of_the_driver_is_killed(start):
    fault = Fault(kind="kill", target="driver_group", at=NOW)
    assert inject.inject(fault, start) == f"SIGKILL to process group {start.pid}"
    wait_until(start.ended)
    assert inject.inject(Fault(kind="kill", target="manager", at=NOW), start) is None


def test_a_moment_comes_with_the_signal_of_its_phase(start):
    signals = start.folders.signals
    signals.write_text("train 5\n")  # of an earlier start
    moment = Moment(phase="train", rollout=2, delay_s=0.0, fraction=0.0)
    reached = inject._watcher(moment, start)
    assert not reached()
    with signals.open("a") as file:
        file.write("generate 3\ntrain 1\n")
    assert not reached()
    with signals.open("a") as file:
        file.write("train 2\n")
    assert reached()


def test_the_evaluation_after_a_rollout_comes_behind_its_training(start):
    reached = inject._watcher(Moment(phase="eval", rollout=3, delay_s=0, fraction=0), start)
    start.folders.signals.write_text("eval -1\ntrain 2\n")
    assert not reached()
    start.folders.signals.write_text("eval -1\ntrain 2\ntrain 3\neval -1\n")
    assert reached()


def test_an_update_comes_behind_a_training_of_this_start(start):
    """Metrics of earlier starts are there from the beginning."""
    metrics = start.folders.run_dir / "metrics.jsonl"
    metrics.parent.mkdir()
    line = '{{"kind": "train", "rollout_id": {}}}\n'
    metrics.write_text(line.format(4) + line.format(5))
    reached = inject._watcher(Moment(phase="update", rollout=1, delay_s=0, fraction=0), start)
    assert not reached()
    start.folders.signals.write_text("train 6\n")
    assert not reached()
    metrics.write_text(metrics.read_text() + line.format(6))
    assert reached()


def test_a_start_that_ends_before_the_moment_is_not_waited_for(start):
    os.kill(start.pid, 9)
    assert not inject.wait_for(Moment(phase="save", rollout=3, delay_s=0, fraction=0), start)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_full_disk_takes_no_byte_more_until_it_is_released(start):
    disk = start.folders.disk
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "chaos", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        fault = Fault(kind="enospc_permanent", target="disk", at=NOW)
        assert inject.inject(fault, start) == f"3 MiB of {disk} taken"
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(b"x")
        inject.release_disk(disk)
        (disk / "more").write_bytes(b"x" * 2**20)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def wait_until(condition, timeout=10):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
