"""Hooks inside the runs: rewards, the ledger of groups, and signals that tell how far the run is.

A run's folders are those of modes.Folders; signals and ledger lie outside of what can be a full disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from slime.core.types import Sample
from tests.chaos.modes import Folders
from tests.e2e.rewards import dense

EVAL_LABEL = "evaluation"
# The tiny model is done with each phase in 0.1 s, and most faults would hit the start.
_SCORE_S = 0.3
_TRAIN_S = 0.2


async def reward(args: Any, sample: Sample) -> float:
    if sample.label == EVAL_LABEL:
        signal(args, "eval")
    else:
        assert sample.index is not None
        signal(
            args, "generate", sample.index // (args.rollout_batch_size * args.n_samples_per_prompt)
        )
    await asyncio.sleep(_SCORE_S)
    return await dense(args, sample)


def train(args: Any, rollout_id: int, batch: object) -> None:
    signal(args, "train", rollout_id)
    time.sleep(_TRAIN_S)


def record_groups(args: Any, groups: list[list[Sample]], data_source: Any) -> None:
    """Every group that the rollout is done with: kept, or rejected by the filter.

    Generated again after a resume, a rollout replaces its own record.
    """
    folder = folders_of(args).ledger
    folder.mkdir(exist_ok=True)
    record = [[group[0].group_index, group[0].prompt, len(group)] for group in groups]
    path = folder / f"{data_source._rollout_id}.json"
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(record))
    fresh.replace(path)


def signal(args: Any, phase: str, rollout_id: int = -1) -> None:
    """Append a line in one write, which does not mix with that of another process."""
    path = folders_of(args).signals
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, f"{phase} {rollout_id}\n".encode())
    finally:
        os.close(handle)


def folders_of(args: Any) -> Folders:
    return Folders(root=Path(args.run_dir).parents[1])
