"""Generation that never stops: nothing lost, nothing too old, and no waiting for the slowest."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from slime.core.types import Status
from slime.rollout import fully_async_rollout
from slime.rollout.context import RolloutContext, WeightClock
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import stream_of
from slime.utils import http
from tests.prompts import rollout_args, sums
from tests.scripted_pool import EQUALS, ScriptedPool, response_of
from tests.tiny import make_byte_tokenizer
from tests.waiting import wait_for

TOKENIZER = make_byte_tokenizer()
HOOKS = "tests.ledger_hooks"
ASYNC = "slime.rollout.fully_async_rollout.generate_rollout"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("async")


def async_args(folder, num_prompts=20, **overrides):
    values = {
        "rollout_function_path": ASYNC,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "custom_rm_path": f"{HOOKS}.reward",
        "num_rollout": 6,
        **overrides,
    }
    return rollout_args(folder, sums(num_prompts), **values)


async def train(seconds, pool, dice=None):
    """Training takes a while, then the engines get new weights; some of them abort what they have."""
    await asyncio.sleep(seconds)
    pool.version += 1
    if dice is not None and dice.random() < 0.5:
        await pool.abort_all()


def update(pool, rollout_id):
    RolloutContext.current().clock.set(pool.version, rollout_id + 1)


@pytest.mark.parametrize("seed", range(120))
def test_random_schedules_lose_nothing_and_respect_the_limit(folder, seed, use_pool):
    dice = random.Random(seed)
    limit = dice.choice([0, 1, 1, 2, 3])
    args = async_args(
        folder,
        rollout_batch_size=dice.randint(1, 4),
        over_sampling_batch_size=dice.randint(4, 8),
        max_weight_staleness=limit,
        dynamic_sampling_filter_path=f"{HOOKS}.coin" if dice.random() < 0.5 else None,
    )
    speeds = [0.0, dice.random() / 2000, dice.random() / 500]
    pool = ScriptedPool(lambda prompt: dice.choice(speeds))
    pool.version = 1
    use_pool(pool, clock=WeightClock(version=1))
    source = RolloutDataSourceWithBuffer(args)
    trained, rejected, rollout_id, resumes = {}, {}, 0, dice.randint(0, 1)
    while rollout_id < args.num_rollout:
        done = source._finished
        output = fully_async_rollout.generate_rollout(args, rollout_id, source)
        trained[rollout_id] = output.samples
        kept = {group[0].group_index for group in output.samples}
        decided = {group[0].group_index for group in done[rollout_id]}
        assert kept <= decided
        rejected[rollout_id] = decided - kept
        for sample in [s for group in output.samples for s in group]:
            oldest = pool.version - limit  # trained on by the version the engines hold
            assert all(
                v >= oldest
                for v, m in zip(sample.weight_versions, sample.loss_mask, strict=True)
                if m
            )
            assert max(sample.weight_versions) >= oldest
        http.run(train(dice.random() / 200, pool, dice))
        update(pool, rollout_id)
        if resumes and dice.random() < 0.4 and rollout_id + 1 < args.num_rollout:
            resumes -= 1
            state = json.loads(json.dumps(http.run(read_state(source, rollout_id))))
            http.run(stream_of(args, source).stop())
            source = RolloutDataSourceWithBuffer(args)
            source.load_state_dict(state)
        rollout_id += 1
    check_ledger(args, source, trained, rejected)


def next_batch_waits(stream):
    return len(stream.finished) == 4 and not stream.running


async def read_state(source, rollout_id):
    return source.state_dict(rollout_id)


def check_ledger(args, source, trained, rejected):
    groups = [group for batch in trained.values() for group in batch]
    where = Counter(group[0].group_index for group in groups)
    where.update(index for indices in rejected.values() for index in indices)
    where.update(group[0].group_index for group in source.buffer)
    assert where == Counter(range(source.next_group_index))
    assert not source._in_flight
    for sample in [s for group in groups for s in group]:
        cut = sample.tokens.index(EQUALS) + 1
        assert sample.tokens[cut:] == response_of(sample.tokens[:cut])
        assert sample.weight_versions == sorted(sample.weight_versions)
        assert sample.status == Status.COMPLETED


def test_generation_goes_on_while_the_trainer_works(folder, use_pool):
    args = async_args(folder)
    pool = ScriptedPool(lambda prompt: 0.001)
    use_pool(pool, clock=WeightClock(version=0))
    source = RolloutDataSourceWithBuffer(args)
    fully_async_rollout.generate_rollout(args, 0, source)
    before = pool.num_requests
    wait_for(lambda: next_batch_waits(stream_of(args, source)))
    http.run(asyncio.sleep(0.1))
    # One update ahead by default: exactly the next batch is made meanwhile.
    assert pool.num_requests <= before + 4 * 2
    stream = stream_of(args, source)
    assert len(stream.finished) == 4 and not stream.running
    made = {group[0].group_index for group in stream.finished.values()}
    update(pool, 0)
    output = fully_async_rollout.generate_rollout(args, 1, source)
    assert {group[0].group_index for group in output.samples} == made
    http.run(stream.stop())


def test_evaluation_works_meanwhile(folder, use_pool):
    data = folder / "train.jsonl"
    args = async_args(folder, eval_interval=1, eval_prompt_data=["sums", str(data)])
    # The first batch comes from the first 8 requests; the next 8, for the second one, have to wait.
    pool = ScriptedPool(lambda prompt: 0.002, lambda number, prompt: 8 <= number < 16)
    use_pool(pool)
    source = RolloutDataSourceWithBuffer(args)
    fully_async_rollout.generate_rollout(args, 0, source)
    wait_for(lambda: len(pool.stalled) == 8)
    output = fully_async_rollout.generate_rollout(args, 0, source, evaluation=True)
    assert len(output.data["sums"].samples) == 20
    assert all(s.status == Status.COMPLETED for s in output.data["sums"].samples)
    assert len(pool.stalled) == 8 and len(stream_of(args, source).running) == 4
    http.run(pool.abort_all())
    second = fully_async_rollout.generate_rollout(args, 1, source)
    assert len(second.samples) == 4
    http.run(stream_of(args, source).stop())


def test_an_aborted_response_continues_behind_its_tokens(folder, use_pool):
    args = async_args(folder, rollout_batch_size=1, n_samples_per_prompt=1, num_rollout=2)
    pool = ScriptedPool(lambda prompt: 0.01)
    use_pool(pool)
    http.background_loop().call_soon_threadsafe(
        lambda: asyncio.get_running_loop().create_task(abort_and_swap(pool))
    )
    source = RolloutDataSourceWithBuffer(args)
    (group,) = fully_async_rollout.generate_rollout(args, 0, source).samples
    versions = group[0].weight_versions
    assert pool.num_aborted and set(versions) == {0, 1}
    prompt = group[0].tokens[: group[0].tokens.index(EQUALS) + 1]
    assert len(versions) == len(response_of(prompt)) and pool.prompts.count(prompt) == 2
    http.run(stream_of(args, source).stop())


async def abort_and_swap(pool):
    while pool.num_tokens < 2:
        await asyncio.sleep(0.001)
    pool.version += 1
    await pool.abort_all()


def test_groups_that_waited_too_long_start_anew(folder, use_pool):
    args = async_args(folder, max_weight_staleness=1)
    pool = ScriptedPool()
    use_pool(pool, clock=WeightClock(version=0))
    source = RolloutDataSourceWithBuffer(args)
    fully_async_rollout.generate_rollout(args, 0, source)
    wait_for(lambda: next_batch_waits(stream_of(args, source)))  # made by version 0
    pool.version = 2  # someone updated twice
    update(pool, 0)
    output = fully_async_rollout.generate_rollout(args, 1, source)
    assert output.metrics["rollout/stale_groups"] == 4
    assert {v for g in output.samples for s in g for v in s.weight_versions} == {2}
    http.run(stream_of(args, source).stop())


def test_long_tails_do_not_hold_up_the_loop(folder, use_pool):
    """One prompt in eight does not end: batches of eight come from the others, and it in the last one."""
    slow = {f"{number}+1=" for number in range(5, 64, 8)}
    encoded = [TOKENIZER.encode(prompt) for prompt in slow]
    args = async_args(folder, 64, rollout_batch_size=8, over_sampling_batch_size=16)
    pool = ScriptedPool(stalls=lambda number, prompt: prompt in encoded)
    use_pool(pool, clock=WeightClock(version=0))
    source = RolloutDataSourceWithBuffer(args)
    trained, last = {}, args.num_rollout - 1
    for rollout_id in range(args.num_rollout):
        if rollout_id == last:
            stream = stream_of(args, source)
            under_way = {group[0].prompt for group in list(stream.running.values())}
            pool.stalls = lambda number, prompt: False
            http.run(pool.abort_all())
        trained[rollout_id] = fully_async_rollout.generate_rollout(args, rollout_id, source).samples
        pool.version += 1
        update(pool, rollout_id)
    prompts = {r: {group[0].prompt for group in groups} for r, groups in trained.items()}
    assert not any(prompts[rollout_id] & slow for rollout_id in range(last))
    assert len(under_way & slow) > 3 and prompts[last] & slow == under_way & slow
    check_ledger(args, source, trained, {})


def test_stopping_gives_everything_back_as_far_as_it_came(folder, use_pool):
    args = async_args(folder, over_sampling_batch_size=6, max_weight_staleness=5)
    # Of the first 6 groups 4 make the batch and 2 wait; the next 6 stall, each sample behind one token.
    pool = ScriptedPool(stalls=lambda number, prompt: number >= 12)
    use_pool(pool, clock=WeightClock(version=0))
    source = RolloutDataSourceWithBuffer(args)
    first = fully_async_rollout.generate_rollout(args, 0, source)
    stream = stream_of(args, source)
    wait_for(lambda: len(pool.stalled) == 12 and len(stream.finished) == 2)
    assert len(stream.running) == 6
    http.run(stream.stop())
    assert len(source.buffer) == 8 and not source._in_flight
    ends = Counter((s.status, s.response_length == 1) for group in source.buffer for s in group)
    assert ends == {(Status.COMPLETED, False): 4, (Status.ABORTED, True): 12}
    pool.stalls = lambda number, prompt: False
    second = fully_async_rollout.generate_rollout(args, 1, source)
    http.run(stream.stop())
    check_ledger(args, source, {0: first.samples, 1: second.samples}, {})
