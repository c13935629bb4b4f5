"""Hooks that tell where a trainer's ranks run, one that keeps the others waiting, and a slow reward."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import torch.distributed as dist

from tests.e2e.rewards import dense


def tell_pid(args, rollout_id, batch) -> None:
    path = Path(args.run_dir) / f"rank_{dist.get_rank()}.pid"
    fresh = path.with_suffix(".new")
    fresh.write_text(str(os.getpid()))
    fresh.replace(path)  # who reads it finds a whole one
    time.sleep(0.2)


def oversleep(args, rollout_id, batch) -> None:
    """Rank 1 does not come back from the second rollout."""
    if dist.get_rank() == 1 and rollout_id == 1:
        time.sleep(600)


async def slow_reward(args, sample) -> float:
    """Generation then takes most of the time of a rollout."""
    await asyncio.sleep(2)
    return await dense(args, sample)
