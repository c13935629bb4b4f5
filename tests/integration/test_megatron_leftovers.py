"""Nothing of a rank that was killed stays behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")


def _rank(connection) -> None:
    import slime.backends.megatron_utils.cpu  # noqa: F401 - before megatron-core
    from slime.backends.megatron_utils.mend import mend_megatron

    mend_megatron()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue = filesystem_async._get_write_results_queue()
    assert filesystem_async._get_write_results_queue() is queue
    queue.put("written")
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    connection.send((queue.get(), [int(pid) for pid in children]))
    time.sleep(600)


def test_the_process_that_holds_results_of_writers_ends_with_its_rank():
    here, there = mp.Pipe()
    rank = mp.get_context("spawn").Process(target=_rank, args=(there,))
    rank.start()
    assert here.poll(120)
    said, children = here.recv()
    assert said == "written"
    children = [pid for pid in children if b"spawn_main" in _command(pid)]
    assert children
    rank.kill()
    rank.join()
    deadline = time.monotonic() + 60
    while any(_command(pid) for pid in children):
        assert time.monotonic() < deadline, "it outlives the rank"
        time.sleep(0.2)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
