"""Generation that never stops: nothing lost, nothing too old, and no waiting for the slowest."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import pytest

from slime.rollout import fully_async_rollout, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import current_pool, install_pool
from slime.rollout.staleness import WeightClock, set_clock
from slime.utils import http
from slime.utils.types import Status
from tests.prompts import rollout_args, sums
from tests.scripted_pool import EQUALS, ScriptedPool, response_of

HOOKS = "tests.ledger_hooks"
ASYNC = "slime.rollout.fully_async_rollout.generate_rollout"


@pytest.fixture(autouse=True)
def no_pool_left():
    yield
    install_pool(None)
    set_clock(None)


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
    set_clock(WeightClock(version=pool.version, next_rollout_id=rollout_id + 1))


@pytest.mark.parametrize("seed", range(120))
def test_random_schedules_lose_nothing_and_respect_the_limit(folder, seed):
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
    install_pool(pool)
    set_clock(WeightClock(version=1, next_rollout_id=0))
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
            http.run(fully_async_rollout._stream.stop())
            source = RolloutDataSourceWithBuffer(args)
            source.load_state_dict(state)
        rollout_id += 1
    check_ledger(args, source, trained, rejected)


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


def test_generation_goes_on_while_the_trainer_works(folder):
    args = async_args(folder)
    pool = ScriptedPool(lambda prompt: 0.001)
    install_pool(pool)
    set_clock(WeightClock(version=0, next_rollout_id=0))
    source = RolloutDataSourceWithBuffer(args)
    fully_async_rollout.generate_rollout(args, 0, source)
    before = pool.num_requests
    http.run(asyncio.sleep(0.3))
    # One update ahead by default: exactly the next batch is made meanwhile.
    assert pool.num_requests <= before + 4 * 2
    stream = fully_async_rollout._stream
    assert len(stream.waiting) == 4 and not stream.running
    made = {group[0].group_index for group in stream.waiting.values()}
    update(pool, 0)
    output = fully_async_rollout.generate_rollout(args, 1, source)
    assert {group[0].group_index for group in output.samples} == made
    http.run(stream.stop())


def test_evaluation_works_meanwhile(folder):
    data = folder / "train.jsonl"
    args = async_args(folder, eval_interval=1, eval_prompt_data=["sums", str(data)])
    pool = ScriptedPool(lambda prompt: 0.002)
    install_pool(pool)
    source = RolloutDataSourceWithBuffer(args)
    fully_async_rollout.generate_rollout(args, 0, source)
    assert fully_async_rollout._stream.running
    output = fully_async_rollout.generate_rollout(args, 0, source, evaluation=True)
    assert len(output.data["sums"].samples) == 20
    assert all(s.status == Status.COMPLETED for s in output.data["sums"].samples)
    second = fully_async_rollout.generate_rollout(args, 1, source)
    assert len(second.samples) == 4
    http.run(fully_async_rollout._stream.stop())


def test_an_aborted_response_continues_behind_its_tokens(folder):
    args = async_args(folder, rollout_batch_size=1, n_samples_per_prompt=1, num_rollout=2)
    pool = ScriptedPool(lambda prompt: 0.01)
    install_pool(pool)
    http.background_loop().call_soon_threadsafe(
        lambda: asyncio.get_running_loop().create_task(abort_and_swap(pool))
    )
    (group,) = fully_async_rollout.generate_rollout(
        args, 0, RolloutDataSourceWithBuffer(args)
    ).samples
    versions = group[0].weight_versions
    assert pool.num_aborted and set(versions) == {0, 1}
    right = response_of(group[0].tokens[: group[0].tokens.index(EQUALS) + 1])
    assert len(versions) == len(right) and pool.num_requests == 2 + len(
        fully_async_rollout._stream.waiting
    ) + len(fully_async_rollout._stream.running)
    http.run(fully_async_rollout._stream.stop())


async def abort_and_swap(pool):
    while not pool.num_requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.025)
    pool.version += 1
    await current_pool().abort_all()


def test_groups_that_waited_too_long_start_anew(folder):
    args = async_args(folder, max_weight_staleness=1)
    pool = ScriptedPool()
    install_pool(pool)
    set_clock(WeightClock(version=0, next_rollout_id=0))
    source = RolloutDataSourceWithBuffer(args)
    fully_async_rollout.generate_rollout(args, 0, source)
    http.run(asyncio.sleep(0.1))  # the next batch waits, made by version 0
    pool.version = 2  # someone updated twice
    update(pool, 0)
    output = fully_async_rollout.generate_rollout(args, 1, source)
    assert output.metrics["rollout/stale_groups"] == 4
    assert {v for g in output.samples for s in g for v in s.weight_versions} == {2}
    http.run(fully_async_rollout._stream.stop())


def run_loop(module, args, train_s):
    """Seconds of a loop over all rollouts with training of `train_s` each."""
    pool = current_pool()
    source = RolloutDataSourceWithBuffer(args)
    set_clock(WeightClock(version=pool.version, next_rollout_id=0))
    started = time.monotonic()
    for rollout_id in range(args.num_rollout):
        module.generate_rollout(args, rollout_id, source)
        http.run(train(train_s, pool))
        update(pool, rollout_id)
    return time.monotonic() - started


def test_long_tails_do_not_hold_up_the_loop(folder):
    """One prompt in eight takes ten times as long: the synchronous loop waits for it every time."""

    def speed(prompt):
        return 0.01 if sum(prompt) % 8 == 0 else 0.001

    args = async_args(folder, 64, num_rollout=8, rollout_batch_size=8, over_sampling_batch_size=16)
    install_pool(ScriptedPool(speed))
    slow = run_loop(sglang_rollout, args.replace(over_sampling_batch_size=8), 0.05)
    fast = []
    while min(fast, default=slow) >= 0.75 * slow:
        assert len(fast) < 5, (fast, slow)  # a busy machine may spoil one or two
        install_pool(ScriptedPool(speed))
        fast.append(run_loop(fully_async_rollout, args, 0.05))
        http.run(fully_async_rollout._stream.stop())


def test_stopping_gives_everything_back_as_far_as_it_came(folder):
    args = async_args(folder, over_sampling_batch_size=6, max_weight_staleness=5)
    pool = ScriptedPool(lambda prompt: 0.01)
    install_pool(pool)
    set_clock(WeightClock(version=0, next_rollout_id=0))
    source = RolloutDataSourceWithBuffer(args)
    first = fully_async_rollout.generate_rollout(args, 0, source)
    http.run(asyncio.sleep(0.03))
    stream = fully_async_rollout._stream
    under_way = len(stream.running) + len(stream.waiting)
    assert stream.running
    http.run(stream.stop())
    assert len(source.buffer) == under_way and not source._in_flight
    waiting = [s for group in source.buffer for s in group]
    assert any(s.status == Status.ABORTED and s.response_length for s in waiting)
    second = fully_async_rollout.generate_rollout(args, 1, source)
    http.run(stream.stop())
    check_ledger(args, source, {0: first.samples, 1: second.samples}, {})
