"""Score samples: by `--rm-type`, a custom function, or the type that a data row names and the user allows.

The built-in types are listed in `slime/config/reward_types.py`, which names the grader of each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slime.config.arguments import Args
from slime.config.datasets import DataSpec
from slime.config.reward_types import BOXED, check_row_type, reward_type
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.rollout.base_types import GroupRewardFunction, Reward, RewardArgs, RewardFunction
from slime.rollout.context import current_generation
from slime.rollout.hook_calls import NUM_THREADS, call_function
from slime.rollout.rm_hub.math_reward import last_boxed
from slime.utils.http import gather
from slime.utils.load_function import load_function
from slime.utils.reasoning_tasks import METADATA_KEY

CUSTOM_TIMEOUT_S = 600.0


async def async_rm(args: RewardArgs, sample: Sample) -> Reward:
    """Return the reward of one sample."""
    path, flag = custom_function(args, sample)
    if path is not None:
        fn = load_function(path, flag=flag, protocol=RewardFunction)
        return check_reward(await _call(fn, args, sample, f"{flag} {path}"), f"{flag} {path}")
    name = _chosen_type(args, sample)
    path = reward_type(name).grader_of(args.rm_grading if isinstance(args, Args) else "lenient")
    grade = load_function(path, flag="--rm-type", protocol=RewardFunction, must_be_async=True)
    if name.startswith(BOXED):
        sample = replace(sample, response=last_boxed(sample.response) or "")
    return check_reward(await grade(args, sample), f"--rm-type {name}")


async def batched_async_rm(args: RewardArgs, samples: list[Sample]) -> list[Reward]:
    """Return the rewards of several samples, scored concurrently."""
    return await gather(async_rm(args, sample) for sample in samples)


async def group_rm(args: RewardArgs, samples: list[Sample]) -> list[Reward]:
    """Return the rewards of a group from one call of the custom function (`--group-rm`)."""
    path, flag = custom_function(args, samples[0])
    if path is None:
        return await batched_async_rm(args, samples)
    fn = load_function(path, flag=flag, protocol=GroupRewardFunction)
    rewards = await _call(fn, args, samples, f"{flag} {path}")
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
        what = f"{len(rewards)} rewards" if isinstance(rewards, (list, tuple)) else repr(rewards)
        raise TypeError(f"{flag} {path} returned {what} for a group of {len(samples)}")
    return [check_reward(reward, f"{flag} {path}") for reward in rewards]


def check_reward(reward: Any, where: str) -> Reward:
    """Return the reward as a finite number (a 0-d array is converted) or a dictionary; raise for anything else.

    The number of a dictionary, under --reward-key, is checked by `_check_key` of `rollout/group_task.py`.
    """
    if isinstance(reward, dict):
        return reward
    return check_number(reward, where, "a number or a dictionary")


def check_number(value: Any, where: str, expected: str = "a number") -> float:
    """Return the value as a finite float; one infinite reward would make the whole group NaN."""
    try:
        number = float("" if isinstance(value, str) else value)  # "0.5" is a mistake, as in a label
    except (TypeError, ValueError):
        raise TypeError(f"{where} returned {value!r}; expected {expected}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where} returned {number}")
    return number


def _chosen_type(args: RewardArgs, sample: Sample) -> str:
    """Return the reward type of the sample: its own if the run allows it, else `--rm-type`.

    Metadata comes from data rows, so a type that the user did not allow is an error.
    """
    row_type = sample.metadata.get("rm_type")
    if row_type not in (None, ""):
        check_row_type(row_type, _allowed(args, sample), f"sample {sample.index}")
        return row_type
    if not args.rm_type:
        raise ConfigError("samples need a reward: set --rm-type or --custom-rm-path")
    return args.rm_type


def _allowed(args: RewardArgs, sample: Sample) -> list[str | None]:
    if not isinstance(args, Args):
        return [args.rm_type]
    origin = sample.metadata.get(METADATA_KEY)
    is_task = isinstance(origin, dict) and origin.get("task") in tasks_of_run(args)
    return [args.rm_type, *args.allow_row_rm_types, *(["reasoning_gym"] if is_task else [])]


def tasks_of_run(args: Args) -> list[str]:
    """Return the tasks of the datasets `reasoning-gym:<task>` of the run."""
    paths = [*(args.prompt_data or []), *(dataset.path for dataset in args.eval_datasets)]
    return [task for path in paths if (task := DataSpec.parse(path).task) is not None]


def custom_function(args: RewardArgs, sample: Sample) -> tuple[str | None, str]:
    """Return the path of the custom function for this sample, and the setting that names it."""
    if sample.custom_rm_path is not None:
        return sample.custom_rm_path, "sample.custom_rm_path"
    return args.custom_rm_path, "--custom-rm-path"


async def _call(fn: Any, args: RewardArgs, samples: Sample | list[Sample], what: str) -> Any:
    return await call_function(
        fn,
        args,
        samples,
        name=what,
        kind="rewards",
        timeout_s=CUSTOM_TIMEOUT_S,
        calls=current_generation().hook_calls,
        num_threads=args.reward_num_threads if isinstance(args, Args) else NUM_THREADS,
    )
