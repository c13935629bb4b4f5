"""Hooks that do what no hook should, for `tests/integration/test_rollout_odd_hooks.py`."""

from __future__ import annotations

import asyncio
import sys

from slime.core.types import Sample, Status
from slime.rollout.sglang_rollout import generate


class Unusual(BaseException):
    """Like the outcomes of test frameworks and cancellations of other event loops."""


def _raise(sample: Sample) -> None:
    if sample.index == 0:
        sys.exit(3)
    if sample.index == 1:
        raise Unusual("not an Exception")
    if sample.index == 2:
        raise asyncio.CancelledError("a task of the hook's own was cancelled")


async def generate_that_exits(args, sample, sampling_params):
    _raise(sample)
    return await generate(args, sample, sampling_params)


async def reward_that_exits(args, sample):
    _raise(sample)
    return 1.0


def plain_reward_that_exits(args, sample):
    _raise(sample)
    return 1.0


async def generate_that_ignores_cancellation(args, sample, sampling_params):
    """The bare except of a retry loop."""
    while sample.group_index:
        try:
            await asyncio.sleep(60)
        except BaseException:
            continue
    return await generate(args, sample, sampling_params)


async def reward_infinite(args, sample):
    return [float("inf"), float("nan"), None, 1.0][sample.index % 4]


async def generate_with_reward_infinite(args, sample, sampling_params):
    done = await generate(args, sample, sampling_params)
    done.reward = await reward_infinite(args, sample)
    return done


async def reward_dictionary_without_numbers(args, sample):
    return {"score": [float("inf"), None, "0.5", 1.0][sample.index % 4]}


async def reward_now_and_then_a_dictionary(args, sample):
    return [1.0, 0, {"score": 1.0}, {"score": 1.0}][sample.index % 4]


async def generate_fresh_samples(args, sample, sampling_params):
    """Samples that the hook made itself, with nothing but what training needs."""
    done = await generate(args, sample, sampling_params)
    return [
        Sample(
            tokens=done.tokens, response_length=done.response_length, reward=1.0,
            rollout_log_probs=done.rollout_log_probs, status=Status.COMPLETED,
        )
    ]  # fmt: skip


async def generate_one_twice(args, sample, sampling_params):
    done = await generate(args, sample, sampling_params)
    return [done, done]


async def generate_nothing(args, sample, sampling_params):
    await generate(args, sample, sampling_params)


async def generate_that_edits_what_it_was_given(args, sample, sampling_params):
    assert [m["content"] for m in sample.prompt] == ["1+1="], sample.prompt
    assert sample.metadata == {"notes": []}, sample.metadata
    assert sampling_params["max_new_tokens"] == 8
    sample.prompt.append({"role": "user", "content": "and now?"})
    sample.prompt[0]["content"] = "?"
    sample.metadata["notes"].append("seen")
    sampling_params["max_new_tokens"] = 3
    sample.tokens = [5, 6, 7]
    return await generate(args, sample, sampling_params)


def filter_without_a_return(args, samples):
    samples[0].reward  # noqa: B018 -- the return was forgotten


def filter_with_a_pair(args, samples):
    return False, "why"


def plain_reward_that_stops_iterating(args, sample):
    return next(number for number in (1.0, 2.0) if number > sample.index)


def reward_that_returns_a_coroutine(args, sample):
    async def later():
        await asyncio.sleep(0)
        return 2.0

    return later()
