"""Run a function on several gloo ranks, one process each."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import run_forked


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank; what each returned. It must be a top-level function."""
    with tempfile.TemporaryDirectory() as folder:
        run_forked(_rank, world_size, function, world_size, folder, args)
        return [pickle.loads(Path(folder, str(r)).read_bytes()) for r in range(world_size)]


def _rank(rank: int, function: Callable[..., Any], world_size: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    result = function(rank, *args)
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
