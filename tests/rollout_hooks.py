"""Hooks that tests name by import path."""

from __future__ import annotations

import asyncio
import threading
import time

from slime.core.types import Sample, Status
from slime.rollout.base_types import DynamicFilterOutput
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import generate
from tests.fake_engine import Reply

seen: list[object] = []  # what hooks want tests to know; tests clear it
gate = threading.Event()  # what blocking hooks wait for; tests close and open it


def opening_at(number):
    """A script of fake engines: the gate is closed until they get this request."""
    gate.clear()

    def script(request):
        if request.number == number:
            gate.set()
        return Reply()

    return script


async def reward_length(args, sample):
    return float(len(sample.response))


def reward_blocking(args, sample):
    return float(gate.wait(60))


async def reward_fails_on_odd(args, sample):
    if sample.index % 2:
        raise ValueError(f"cannot score {sample.index}")
    return 1.0


async def reward_fails_on_first_groups(args, sample):
    if sample.group_index < 3:
        raise ValueError("no")
    return 1.0


async def reward_always_fails(args, sample):
    raise ValueError("the judge is out")


async def reward_times_out(args, sample):
    raise TimeoutError("the judge did not answer")


async def reward_dictionary(args, sample):
    return {"score": 0.5, "detail": "fine"}


async def reward_group(args, samples):
    order = sorted(samples, key=lambda s: s.index)
    return [float(order.index(sample)) for sample in samples]


async def reward_group_short(args, samples):
    return [1.0]


async def generate_two_turns(args, sample, sampling_params, evaluation=False):
    seen.append(("evaluation", evaluation))
    sample = await generate(args, sample, sampling_params)
    if sample.status == Status.ABORTED:
        return sample
    tool = [1, 2, 3]
    sample.append_response_tokens(tokens=tool, trainable=False)
    sample.response += "<tool>"
    return await generate(args, sample, sampling_params)


async def generate_two_samples(args, sample, sampling_params):
    first = await generate(args, sample, sampling_params)
    return [first, first.clone()]


async def generate_fails_on_odd(args, sample, sampling_params):
    if sample.index % 2:
        raise RuntimeError("the sandbox broke")
    return await generate(args, sample, sampling_params)


async def generate_misaligned(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = [1]
    return sample


async def generate_breaks_half_way(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.tokens = [*sample.tokens, 1, 2, 3]
    sample.response_length += 3
    if sample.index % 2:
        raise RuntimeError("the sandbox broke")
    return sample


async def generate_gives_up(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    if sample.index % 2:
        sample.status = Status.ABORTED if sample.index == 1 else Status.FAILED
    return sample


async def generate_with_metadata(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.train_metadata = {"turns": 1}
    sample.reward = await async_rm(args, sample)
    return sample


async def generate_slowly(args, sample, sampling_params):
    await asyncio.sleep(30)
    return sample


def keep_even_groups(args, samples, **kwargs):
    return DynamicFilterOutput(keep=samples[0].group_index % 2 == 0, reason="odd_group")


def keep_as_bool(args, samples):
    return samples[0].group_index >= 2


def newest_first(args, rollout_id, buffer, num_samples):
    seen.append(("rollout_id", rollout_id))
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def hook_that_notes(args, sample):
    seen.append((sample.index, sample.reward))


async def hook_that_splits(args, sample):
    """Two samples instead of each, with rewards of their own."""
    second = sample.clone()
    sample.reward, second.reward = 0.25, 0.75
    return [sample, second]


def hook_that_fails_on_odd(args, sample):
    tokens, sample.tokens = sample.tokens, []
    if sample.index % 2:
        raise RuntimeError("no such column")
    sample.tokens = tokens


def hook_without_reward(args, sample):
    sample.reward = None


def hook_that_drops(args, sample):
    return []


def remove_long(args, groups):
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.response_length > 3


def note_all_groups(args, all_groups, data_source):
    seen.append(("all", [group[0].group_index for group in all_groups], len(data_source)))


async def reward_blocks_its_loop(args, sample):
    seen.append("begins")
    opened = gate.wait(60)
    seen.append("ends")
    return float(opened)


async def reward_by_the_engine(args, sample):
    judge = Sample(prompt=f"grade {sample.response}=", index=sample.index)
    judge = await generate(args, judge, {"max_new_tokens": 8})
    return float(judge.response)


async def generate_uneven(args, sample, sampling_params):
    """Two segments for the first sample of all, one for every other."""
    first = await generate(args, sample.clone(), sampling_params)
    if sample.index != 0:
        return first
    return [first, await generate(args, sample.clone(), sampling_params)]


def reward_waiting(args, sample):
    """Blocks its thread, as a request to a judge would."""
    time.sleep(0.3)
    return 1.0


_four = threading.Barrier(4)


def reward_of_four(args, sample):
    """Fails unless four of its calls run at the same time."""
    _four.wait(60)
    return 1.0


never = threading.Event()


def reward_stuck(args, sample):
    never.wait(600)  # the line that is told
    return 1.0


async def reward_stuck_async(args, sample):
    await asyncio.sleep(600)  # the line that is told
    return 1.0
