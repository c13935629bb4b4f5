"""`--rm-type random`, for tests of a setup, and `--rm-type remote_rm`, scored by an HTTP service."""

from __future__ import annotations

from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.rollout.rm_hub.settings import Reward, RewardArgs
from slime.rollout.sampling import hash32
from slime.utils.http import post

REMOTE_TIMEOUT_S = 300.0


async def random(args: RewardArgs, sample: Sample) -> float:
    """Return 0 or 1 by the sample's index (or its texts), the same in every run."""
    identity = (sample.index,) if sample.index is not None else (sample.prompt, sample.response)
    return float(hash32("random_rm", *identity) & 1)


async def remote_rm(args: RewardArgs, sample: Sample) -> Reward:
    """POST {prompt, response, label} to `--rm-url`."""
    return await ask_service(sample, args.rm_url)


async def ask_service(
    sample: Sample, url: str | None, deadline_s: float = REMOTE_TIMEOUT_S
) -> Reward:
    """Return the JSON reply of the service: a number, or an object for `--reward-key`."""
    if not url:
        raise ConfigError("--rm-type remote_rm needs the address of the service: --rm-url")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(url, payload, deadline_s=deadline_s)
