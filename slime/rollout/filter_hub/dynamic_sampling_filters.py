"""Choose which groups to train on (`--dynamic-sampling-filter-path`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime.core.types import Sample, Status
from slime.rollout.base_types import DynamicFilterOutput

if TYPE_CHECKING:
    from slime.config.arguments import Args


def check_reward_nonzero_std(
    args: Args, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: with equal rewards every advantage of GRPO is zero.

    Failed samples have no reward and are ignored.
    """
    rewards = {
        sample.get_reward_value(args.reward_key)
        for sample in samples
        if sample.status != Status.FAILED
    }
    if len(rewards) > 1:
        return DynamicFilterOutput(keep=True)
    common = f"{rewards.pop():g}" if rewards else "none"
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{common}")


def check_reward_nonzero_std_with_fallback(
    args: Args, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Prefer groups whose rewards differ, but take others rather than generate further groups."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)
