"""Hooks of the ledger tests; what they decide depends on the sample alone, so a resume repeats it."""

from __future__ import annotations

from slime.rollout.base_types import DynamicFilterOutput
from slime.rollout.sampling import hash32


async def reward(args, sample):
    return float(sample.index % 2)


async def reward_zero(args, sample):
    return 0.0


async def reward_sometimes_fails(args, sample):
    if hash32("fails", sample.index) % 8 == 0:
        raise ValueError("no grade")
    return float(sample.index % 2)


def coin(args, samples, **kwargs):
    return DynamicFilterOutput(keep=hash32("coin", samples[0].group_index) % 2 == 0, reason="coin")


def nothing(args, samples, **kwargs):
    return DynamicFilterOutput(keep=False, reason="too_dull")


def raises_at_third(args, samples, **kwargs):
    return bool(1 / (2 - samples[0].group_index)) or True


def any_of_them(args, rollout_id, buffer, num_samples):
    """Every second group of the buffer, newest first."""
    taken = buffer[::-2][:num_samples]
    buffer[:] = [group for group in buffer if not any(group is one for one in taken)]
    return taken
