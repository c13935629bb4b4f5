"""`--rm-type remote_rm`: a service at `--rm-url` scores {prompt, response, label}."""

from __future__ import annotations

from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.rollout.rm_hub.settings import Reward, RewardArgs
from slime.utils.http import post

DEADLINE_S = 300.0


async def reward(args: RewardArgs, sample: Sample) -> Reward:
    return await grade(sample, args.rm_url)


async def grade(sample: Sample, url: str | None, deadline_s: float = DEADLINE_S) -> Reward:
    """The JSON the service answers: a number, or an object for `--reward-key`."""
    if not url:
        raise ConfigError("--rm-type remote_rm needs the address of the service: --rm-url")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(url, payload, deadline_s=deadline_s)
