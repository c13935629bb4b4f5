"""Hooks that hold a run in the middle of something, until the test that started it lets it go on.

    runs.command(..., custom_generate_function_path=gates.GENERATE)
    gate = Gate(run_dir)
    gate.wait(process)       rollout HELD has got so far, and stays there however long the test takes
    gate.open()              for good: also if the run is started again

Gates are files beside the run's folder, which the hooks find in any process of any of its starts.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.core.types import Sample
from slime.rollout.sglang_rollout import generate as generate_freely
from tests.e2e import runs
from tests.e2e.rewards import dense

HELD = 2
GENERATE = "tests.e2e.gates.generate"  # --custom-generate-function-path: no request is made yet
SCORE = "tests.e2e.gates.score"  # --custom-rm-path: rewards, and tells of the first one
TRAIN = "tests.e2e.gates.train"  # --rollout-data-postprocess-path: before the first step
UPDATE = "tests.e2e.gates.update"  # the same: in the update after the rollout, between two buckets
_LOOK_EVERY_S = 0.02
_BUCKET = 2


class Gate:
    def __init__(self, run_dir: str | Path) -> None:
        beside = Path(run_dir).parent
        self._reached, self._open = beside / "gate_reached", beside / "gate_open"
        self._scored = beside / "gate_scored"

    def wait(self, process: subprocess.Popen[str]) -> None:
        runs.wait_for(self._reached.exists, process)

    def wait_for_score(self, process: subprocess.Popen[str]) -> None:
        """Until a sample of the held rollout, which was let go on, has a reward."""
        runs.wait_for(self._scored.exists, process)

    def open(self) -> None:
        self._open.touch()

    def reach(self) -> bool:
        """Tell the test, and say whether it lets the run go on."""
        self._reached.touch()
        return self._open.exists()

    def hold(self) -> None:
        while not self.reach():
            time.sleep(_LOOK_EVERY_S)

    def tell_of_score(self) -> None:
        self._scored.touch()


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    gate = Gate(args.run_dir)
    while _is_held(args, sample) and not gate.reach():
        await asyncio.sleep(_LOOK_EVERY_S)
    return await generate_freely(args, sample, sampling_params)


async def score(args: Any, sample: Sample) -> float:
    if _is_held(args, sample):
        Gate(args.run_dir).tell_of_score()
    return await dense(args, sample)


def train(args: Any, rollout_id: int, batch: object) -> None:
    if rollout_id == HELD:
        Gate(args.run_dir).hold()


def update(args: Any, rollout_id: int, batch: object) -> None:
    """Engines wait for the bucket meanwhile: they have been told to take it."""
    if rollout_id != HELD:
        return
    broadcast, count = dist.broadcast, 0

    def held(*tensors: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == _BUCKET:
            Gate(args.run_dir).hold()
        return broadcast(*tensors, **options)

    dist.broadcast = held


def _is_held(args: Any, sample: Sample) -> bool:
    assert sample.index is not None
    return sample.index // (args.rollout_batch_size * args.n_samples_per_prompt) == HELD
