"""Score samples: by `--rm-type`, a custom function, or the type that a data row asks for and the user allows.

The built-in types are listed in `slime/config/reward_types.py`, which names the grader of each.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from slime.config.reward_types import BOXED, reward_type
from slime.core.types import Sample
from slime.rollout.base_types import GroupRewardFunction, RewardFunction
from slime.rollout.context import current_generation
from slime.rollout.hook_calls import HookTimer, hook_queue, in_thread, on_hook_loop, run_hook
from slime.rollout.rm_hub.math_reward import last_boxed
from slime.rollout.rm_hub.settings import Reward, RewardArgs, chosen_type
from slime.utils.http import gather
from slime.utils.load_function import is_async, load_function

CUSTOM_TIMEOUT_S = 600.0


async def async_rm(args: RewardArgs, sample: Sample) -> Reward:
    """Return the reward of one sample."""
    path, flag = _custom_path(args, sample)
    if path is not None:
        fn = load_function(path, flag=flag, protocol=RewardFunction)
        return check_reward(await _call(fn, args, sample, f"{flag} {path}"), f"{flag} {path}")
    name = chosen_type(args, sample)
    grade = load_function(
        reward_type(name).grader, flag="--rm-type", protocol=RewardFunction, must_be_async=True
    )
    if name.startswith(BOXED):
        sample = replace(sample, response=last_boxed(sample.response) or "")
    return check_reward(await grade(args, sample), f"--rm-type {name}")


async def batched_async_rm(args: RewardArgs, samples: list[Sample]) -> list[Reward]:
    """Return the rewards of several samples, scored concurrently."""
    return await gather(async_rm(args, sample) for sample in samples)


async def group_rm(args: RewardArgs, samples: list[Sample]) -> list[Reward]:
    """Return the rewards of a group from one call of the custom function (`--group-rm`)."""
    path, flag = _custom_path(args, samples[0])
    if path is None:
        return await batched_async_rm(args, samples)
    fn = load_function(path, flag=flag, protocol=GroupRewardFunction)
    rewards = await _call(fn, args, samples, f"{flag} {path}")
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
        what = f"{len(rewards)} rewards" if isinstance(rewards, (list, tuple)) else repr(rewards)
        raise TypeError(f"{flag} {path} returned {what} for a group of {len(samples)}")
    return [check_reward(reward, f"{flag} {path}") for reward in rewards]


def check_reward(reward: Any, where: str) -> Reward:
    """Return the reward as a number (a 0-d array is converted) or a dictionary; raise for anything else."""
    if isinstance(reward, dict):
        return reward
    return check_number(reward, where, "a number or a dictionary")


def check_number(value: Any, where: str, expected: str = "a number") -> float:
    """Return the value as a finite float; one infinite reward would make the whole group NaN."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{where} returned {value!r}; expected {expected}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where} returned {number}")
    return number


def _custom_path(args: RewardArgs, sample: Sample) -> tuple[str | None, str]:
    """Return the path of the custom function for this sample, and the setting that names it."""
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path, "sample.custom_rm_path"
    return args.custom_rm_path, "--custom-rm-path"


async def _call(fn: Any, args: RewardArgs, samples: Sample | list[Sample], what: str) -> Any:
    """Run async functions on the second event loop and plain ones in a thread.

    One that is slow or blocks delays other rewards at most, never the generation.
    """
    timer = HookTimer(hook_queue("async rewards" if is_async(fn) else "plain rewards"))

    def timed() -> Any:
        with timer.running():
            return fn(args, samples)

    async def timed_await(result: Awaitable[Any]) -> Any:
        with timer.running():
            return await result

    async def call() -> Any:
        if is_async(fn):
            return await on_hook_loop(timed_await(fn(args, samples)))
        result = await in_thread(timed)
        return await on_hook_loop(timed_await(result)) if inspect.isawaitable(result) else result

    generation = current_generation()
    calls = None if generation is None else generation.hook_calls
    return await run_hook(call(), name=what, timeout_s=CUSTOM_TIMEOUT_S, timer=timer, calls=calls)
