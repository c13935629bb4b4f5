"""Processes that are ranks again and again: importing a trainer takes longer than most of what they do.

`run_megatron_ranks` and `run_fsdp_ranks` have the meaning of tests/ranks.py's `run_ranks`. Processes are
started when first needed, kept for the next test, and given up when one of them fails.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forked import start_forked

_MEGATRON, _FSDP = "slime.backends.megatron_utils.actor", "slime.backends.fsdp_utils.actor"
_workers: dict[str, list[_Worker]] = {_MEGATRON: [], _FSDP: []}


def run_megatron_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; what each returned. It must be a top-level function."""
    return _run_ranks(_MEGATRON, function, world_size, args)


def run_fsdp_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; what each returned. It must be a top-level function."""
    return _run_ranks(_FSDP, function, world_size, args)


def start_workers(count: int) -> None:
    """Of Megatron. They import what they need by themselves, so this may be called early."""
    _start(_MEGATRON, count)


def _start(trainer: str, count: int) -> None:
    while len(_workers[trainer]) < count:
        _workers[trainer].append(_Worker(trainer))


def _run_ranks(
    trainer: str, function: Callable[..., Any], world_size: int, args: tuple[Any, ...]
) -> list[Any]:
    _start(trainer, world_size)
    workers = _workers[trainer][:world_size]
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(workers):
            worker.send((function, rank, world_size, folder, args))
        answers = _collect(workers)
    return [answers[rank] for rank in range(world_size)]


class _Worker:
    def __init__(self, trainer: str) -> None:
        self.connection, theirs = Pipe()
        # Not a daemon: a save in the background is a process of its own.
        self.process = start_forked(_serve, theirs, trainer)
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
    for workers in _workers.values():
        while workers:
            worker = workers.pop()
            worker.connection.close()
            worker.process.terminate()
            worker.process.join()


def _serve(connection: Connection, trainer: str) -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module(trainer)

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

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    result = function(rank, *args)
    dist.barrier()
    if parallel_state := sys.modules.get("megatron.core.parallel_state"):
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
    return result
