"""`--rm-type random`: 0 or 1 from the sample's index (or its texts), the same in every run."""

from __future__ import annotations

from slime.core.types import Sample
from slime.rollout.rm_hub.settings import RewardArgs
from slime.rollout.sampling import hash32


async def reward(args: RewardArgs, sample: Sample) -> float:
    return grade(sample)


def grade(sample: Sample) -> float:
    identity = (sample.index,) if sample.index is not None else (sample.prompt, sample.response)
    return float(hash32("random_rm", *identity) & 1)
