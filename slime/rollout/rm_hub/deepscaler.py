r"""`--rm-type deepscaler`: like math, but only behind the thinking part, without which it is 0."""

from __future__ import annotations

from slime.core.types import Sample
from slime.rollout.rm_hub import math_boxed
from slime.rollout.rm_hub.settings import RewardArgs, isolated


async def reward(args: RewardArgs, sample: Sample) -> float:
    return await grade(sample.response, sample.label, isolate=isolated(args))


async def grade(response: str, label: object, *, isolate: bool = True) -> float:
    for marker in ("</think>", "###Response"):
        if marker in response:
            answer = response.rsplit(marker, 1)[1]
            return await math_boxed.grade(answer, label, isolate=isolate)
    return 0.0
