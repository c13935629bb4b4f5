"""Nothing of a rank that was killed stays behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("megatron.core")


def _rank(connection) -> None:
    import slime.backends.megatron_utils.cpu  # noqa: F401 - before megatron-core
    from slime.backends.megatron_utils.patches import patch_megatron

    patch_megatron()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue = filesystem_async._get_write_results_queue()
    assert filesystem_async._get_write_results_queue() is queue
    queue.put("written")
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    connection.send((queue.get(), [int(pid) for pid in children]))
    time.sleep(600)


def test_the_process_that_holds_results_of_writers_ends_with_its_rank(tmp_path, monkeypatch):
    """And nothing of it is in TMPDIR, neither while it runs nor afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    here, there = mp.Pipe()
    rank = mp.get_context("spawn").Process(target=_rank, args=(there,))
    rank.start()
    assert here.poll(300)
    said, children = here.recv()
    assert said == "written"
    holders = [process for process in map(psutil.Process, children) if _is_holder(process)]
    assert holders
    assert not list(tmp_path.glob("pymp-*"))
    rank.kill()
    rank.join()
    deadline = time.monotonic() + 120
    while any(_lives(process) for process in holders):
        assert time.monotonic() < deadline, "it outlives the rank"
        time.sleep(0.2)
    assert not list(tmp_path.glob("pymp-*"))


def _is_holder(process: psutil.Process) -> bool:
    return any("spawn_main" in word for word in process.cmdline())


def _lives(process: psutil.Process) -> bool:
    """Another process may have its id by now, and nobody may have asked for its status yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
