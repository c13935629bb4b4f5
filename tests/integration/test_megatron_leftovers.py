"""What writers of a checkpoint return reaches their rank, and nothing is left of a rank that was killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")


def _write(results, size: int) -> None:
    results.put({"written": "x" * size})


def _rank(connection) -> None:
    import slime.backends.megatron_utils.cpu  # noqa: F401 - before megatron-core
    from slime.backends.megatron_utils.patches import patch_megatron

    patch_megatron()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = filesystem_async._get_write_results_queue()
    assert filesystem_async._get_write_results_queue() is results
    sizes = []
    for size in (3, 1_000_000, 5):  # more than a pipe holds
        writer = mp.get_context("fork").Process(target=_write, args=(results, size))
        writer.start()
        writer.join()
        sizes.append(len(results.get_nowait()["written"]))
    for size in (1, 2):
        _write(results, size)
    sizes += [len(results.get_nowait()["written"]) for _ in range(2)]
    os.pwrite(results._file, b"\x80\x05X", 0)  # of a writer that was killed
    found = []
    for _ in range(2):
        try:
            found.append(results.get_nowait())
        except queue.Empty:
            found.append("empty")
    _write(results, 7)
    sizes.append(len(results.get_nowait()["written"]))
    me = os.getpid()
    connection.send((sizes, found, Path(f"/proc/{me}/task/{me}/children").read_text()))


def test_results_of_forked_writers_reach_their_rank_without_a_process(tmp_path, monkeypatch):
    """Nothing of it is in TMPDIR, and no process is there that could outlive the rank."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    here, there = mp.Pipe()
    rank = mp.get_context("spawn").Process(target=_rank, args=(there,))
    rank.start()
    assert here.poll(300)
    assert here.recv() == ([3, 1_000_000, 5, 1, 2, 7], ["empty", "empty"], "")
    rank.join()
    assert not list(tmp_path.glob("pymp-*"))
