"""Rewards: `--rm-type`, a custom function, or the type a row asks for where the user allows it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from slime.config.reward_types import BOXED, reward_type
from slime.core.types import Sample
from slime.rollout.base_types import GroupRewardFunction, RewardFunction
from slime.rollout.generate_call import current_calls
from slime.rollout.rm_hub.boxed import last_boxed
from slime.rollout.rm_hub.settings import Reward, RewardArgs, chosen_type
from slime.rollout.user_code import Turn, contain, elsewhere, in_thread
from slime.utils.http import gather
from slime.utils.load_function import is_async, load_function

CUSTOM_TIME_LIMIT_S = 600.0


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
    """The rewards of several samples, scored side by side."""
    return await gather(async_rm(args, sample) for sample in samples)


async def group_rm(args: RewardArgs, samples: list[Sample]) -> list[Reward]:
    """The rewards of a group from one call of the custom function (`--group-rm`)."""
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
    """A number (or what turns into one, such as a 0-d array), or a dictionary."""
    if isinstance(reward, dict):
        return reward
    return check_number(reward, where, "a number or a dictionary")


def check_number(value: Any, where: str, expected: str = "a number") -> float:
    """Nothing else may reach a group's statistics: one infinite reward makes NaN of all of them."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{where} returned {value!r}; expected {expected}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where} returned {number}")
    return number


def _custom_path(args: RewardArgs, sample: Sample) -> tuple[str | None, str]:
    """The path of the custom function for this sample, and what named it."""
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path, "sample.custom_rm_path"
    return args.custom_rm_path, "--custom-rm-path"


async def _call(fn: Any, args: RewardArgs, samples: Sample | list[Sample], what: str) -> Any:
    """Async functions run on an event loop of their own, plain ones in a thread: slow ones, and those
    that block, hold up other rewards at most, never the generation."""
    turn = Turn("async rewards" if is_async(fn) else "plain rewards")

    async def call() -> Any:
        if is_async(fn):
            return await elsewhere(_awaited(fn(args, samples), turn))
        result = await in_thread(_timed, turn, fn, args, samples)
        return await elsewhere(_awaited(result, turn)) if inspect.isawaitable(result) else result

    limit = CUSTOM_TIME_LIMIT_S
    return await contain(call(), what=what, limit_s=limit, turn=turn, calls=current_calls())


def _timed(turn: Turn, fn: Callable[..., Any], *args: Any) -> Any:
    with turn.taken():
        return fn(*args)


async def _awaited(result: Awaitable[Any], turn: Turn) -> Any:
    with turn.taken():
        return await result
