"""Hooks of slime's side of vs_trl_cpu.py and step_gpu.py: the reward, and responses of a given number of tokens."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.arithmetic import response_length, score
from slime.core.types import Sample
from slime.rollout.sglang_rollout import generate as generate_one

LENGTHS = "SLIME_BENCH_LENGTHS"


async def reward(args: Any, sample: Sample, **_: Any) -> float:
    return score(sample.response, sample.label)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    assert sample.index is not None
    wanted = response_length(os.environ[LENGTHS], sample.index)
    return await generate_one(
        args, sample, {**sampling_params, "min_new_tokens": wanted, "max_new_tokens": wanted}
    )


async def generate_past_ends(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate with ignore_eos: forbidding the end of text would take the engine's slow sampling."""
    assert sample.index is not None
    wanted = response_length(os.environ[LENGTHS], sample.index)
    return await generate_one(
        args, sample, {**sampling_params, "ignore_eos": True, "max_new_tokens": wanted}
    )
