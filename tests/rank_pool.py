"""Processes that are ranks again and again: importing megatron takes longer than most of what they do.

`run_megatron_ranks` has the meaning of tests/ranks.py's `run_ranks`. Processes are started when first needed,
kept for the next test, and given up when one of them fails.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_workers: list[_Worker] = []


def run_megatron_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; what each returned. It must be a top-level function."""
    start_workers(world_size)
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(_workers[:world_size]):
            worker.send((function, rank, world_size, folder, args))
        answers = _collect(_workers[:world_size])
    return [answers[rank] for rank in range(world_size)]


def start_workers(count: int) -> None:
    """They import what they need by themselves, so this may be called early."""
    while len(_workers) < count:
        _workers.append(_Worker())


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not a daemon: a save in the background is a process of its own.
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def send(self, task: Any) -> None:
        self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return False, "the process of a rank has died"


def _collect(workers: list[_Worker]) -> dict[int, Any]:
    """All answers; the first failure ends all processes, as the others wait for the one that failed."""
    answers: dict[int, Any] = {}
    ranks = {worker.connection: rank for rank, worker in enumerate(workers)}
    while len(answers) < len(workers):
        for connection in wait([c for c, rank in ranks.items() if rank not in answers]):
            rank = ranks[connection]  # type: ignore[index]
            fine, value = workers[rank].receive()
            if not fine:
                end_workers()
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            answers[rank] = value
    return answers


@atexit.register
def end_workers() -> None:
    while _workers:
        worker = _workers.pop()
        worker.connection.close()
        worker.process.terminate()
        worker.process.join()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    import slime.backends.megatron_utils.actor  # noqa: F401

    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = True, _run(*pickle.loads(task))
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


def _run(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]
) -> Any:
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    result = function(rank, *args)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
    return result
