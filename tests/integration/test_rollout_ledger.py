"""Hundreds of random schedules: every sample is trained on once, rejected, or still waiting."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from slime.core.errors import UserError
from slime.core.types import Status
from slime.rollout import sglang_rollout
from slime.rollout.context import WeightClock
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from tests.prompts import rollout_args, sums
from tests.scripted_pool import EQUALS, ScriptedPool, response_of

HOOKS = "tests.ledger_hooks"
NUM_ROLLOUTS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger")


def random_args(folder, dice):
    batch, group_size = dice.randint(1, 4), dice.randint(1, 3)
    # A batch in which every sample fails stops the run, as it should; large ones never come to that.
    rewards = ["reward", "reward_sometimes_fails"] if batch * group_size >= 6 else ["reward"]
    args = rollout_args(
        folder,
        sums(dice.choice([3, 7, 20])),
        rollout_batch_size=batch,
        over_sampling_batch_size=batch + dice.randint(0, 4),
        n_samples_per_prompt=group_size,
        rollout_shuffle=dice.random() < 0.5,
        rollout_seed=dice.randint(0, 1000),
        dynamic_sampling_filter_path=f"{HOOKS}.coin" if dice.random() < 0.6 else None,
        custom_rm_path=f"{HOOKS}.{dice.choice(rewards)}",
        partial_rollout=dice.random() < 0.6,
        buffer_filter_path=f"{HOOKS}.any_of_them" if dice.random() < 0.3 else None,
    )
    return args.replace(mask_offpolicy_in_partial_rollout=dice.random() < 0.3)


class Ledger:
    """What was trained on and rejected, by rollout, so that a resume can strike entries out."""

    def __init__(self):
        self.trained: dict[int, list] = {}
        self.rejected: dict[int, list[int]] = {}

    def enter(self, rollout_id, groups, kept):
        indices = {group[0].group_index for group in kept}
        self.trained[rollout_id] = kept
        self.rejected[rollout_id] = [i for i in groups if i not in indices]

    def strike_out_after(self, rollout_id):
        for entries in (self.trained, self.rejected):
            for later in [r for r in entries if r > rollout_id]:
                del entries[later]

    def check(self, source, args):
        trained = [g for groups in self.trained.values() for g in groups]
        where = Counter(group[0].group_index for group in trained)
        where.update(index for indices in self.rejected.values() for index in indices)
        where.update(group[0].group_index for group in source.buffer)
        assert where == Counter(range(source.next_group_index))
        samples = Counter(sample.index for group in trained for sample in group)
        waiting = Counter(sample.index for group in source.buffer for sample in group)
        assert set((samples + waiting).values()) <= {1}
        for group in trained:
            assert len(group) == args.n_samples_per_prompt
            for sample in group:
                check_sample(sample)
        for sample in [s for group in source.buffer for s in group]:
            check_part(sample, args)


def check_sample(sample):
    if sample.status == Status.FAILED:
        assert sample.remove_sample
    cut = sample.tokens.index(EQUALS) + 1
    right = response_of(sample.tokens[:cut])
    assert sample.tokens[cut:] == right and sample.response_length == len(right)
    assert sample.rollout_log_probs == [-token / 100 for token in right]
    assert sample.weight_versions == sorted(sample.weight_versions)
    assert len(sample.weight_versions) == len(sample.loss_mask) == len(right)


def check_part(sample, args):
    cut = sample.tokens.index(EQUALS) + 1
    part = sample.tokens[cut:]
    assert part == response_of(sample.tokens[:cut])[: len(part)]
    assert sample.response_length == len(part)
    assert args.partial_rollout or not part


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules_lose_nothing_and_train_nothing_twice(folder, seed, use_pool):
    dice = random.Random(seed)
    args = random_args(folder, dice)
    speeds = [0.0, 0.0, dice.random() / 2000, dice.random() / 800]
    pool = ScriptedPool(lambda prompt: dice.choice(speeds))
    use_pool(pool)
    source, ledger, rollout_id = RolloutDataSourceWithBuffer(args), Ledger(), 0
    resumes = dice.randint(0, 2)
    while rollout_id < NUM_ROLLOUTS:
        watched = Watched(source)
        output = sglang_rollout.generate_rollout(args, rollout_id, watched)
        ledger.enter(rollout_id, watched.done, output.samples)
        check_mask(args, output.samples)
        pool.version += 1
        if resumes and dice.random() < 0.3:
            resumes -= 1
            last = rollout_id - dice.randint(0, 1)  # the checkpoint may be a rollout behind
            state = json.loads(json.dumps(source.state_dict(last)))
            source = RolloutDataSourceWithBuffer(args)
            source.load_state_dict(state)
            ledger.strike_out_after(last)
            rollout_id = last
        rollout_id += 1
    ledger.check(source, args)
    assert not source._in_flight


class Watched:
    """The data source, noting which groups each rollout says it is done with."""

    def __init__(self, source):
        self._source, self.done = source, []

    def finish(self, rollout_id, group_indices):
        self.done += group_indices
        self._source.finish(rollout_id, list(group_indices))

    def __getattr__(self, name):
        return getattr(self._source, name)

    def __len__(self):
        return len(self._source)


def check_mask(args, groups):
    """With the flag exactly the tokens of older weights are masked; without it none is."""
    samples = [s for group in groups for s in group]
    newest = max(max(s.weight_versions) for s in samples)
    for sample in samples:
        masked = args.mask_offpolicy_in_partial_rollout
        assert sample.loss_mask == [int(not masked or v == newest) for v in sample.weight_versions]


def test_the_schedules_do_abort_and_continue(folder, use_pool):
    """The random test would prove nothing if no response were ever cut and continued."""
    args = rollout_args(
        folder, sums(20), rollout_batch_size=2, over_sampling_batch_size=6, partial_rollout=True,
        custom_rm_path=f"{HOOKS}.reward",
    )  # fmt: skip
    dice = random.Random(0)
    pool = ScriptedPool(lambda prompt: dice.choice([0.0, 0.002]))
    use_pool(pool)
    source = RolloutDataSourceWithBuffer(args)
    spanning = 0
    for rollout_id in range(10):
        output = sglang_rollout.generate_rollout(args, rollout_id, source)
        pool.version += 1
        spanning += sum(len(set(s.weight_versions)) > 1 for g in output.samples for s in g)
    assert pool.num_aborted > 5 and spanning > 2


def test_a_filter_that_rejects_everything_stops_the_run_with_the_reasons(folder, use_pool):
    args = rollout_args(
        folder, sums(5), rollout_batch_size=2, n_samples_per_prompt=1,
        custom_rm_path=f"{HOOKS}.reward_zero",
        dynamic_sampling_filter_path=f"{HOOKS}.nothing",
    )  # fmt: skip
    pool = ScriptedPool()
    use_pool(pool)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(UserError) as caught:
        sglang_rollout.generate_rollout(args, 3, source)
    for part in ("rollout 3", f"{HOOKS}.nothing", "256 groups in a row", "too_dull: 256", "0 of 2"):
        assert part in str(caught.value)
    assert 256 <= pool.num_requests <= 256 + args.over_sampling_batch_size
    assert sorted(g[0].group_index for g in source.buffer) == list(range(source.next_group_index))


def test_a_batch_that_fails_gives_back_what_it_had_kept(folder, use_pool):
    args = rollout_args(
        folder, sums(6), rollout_batch_size=4, n_samples_per_prompt=1,
        custom_rm_path=f"{HOOKS}.reward",
        dynamic_sampling_filter_path=f"{HOOKS}.raises_at_third",
    )  # fmt: skip
    use_pool(ScriptedPool())
    source = RolloutDataSourceWithBuffer(args)
    named = r"--dynamic-sampling-filter-path .*raises_at_third failed at .*ZeroDivisionError"
    with pytest.raises(UserError, match=named):
        sglang_rollout.generate_rollout(args, 0, source)
    assert sorted(g[0].group_index for g in source.buffer) == [0, 1, 2, 3]
    assert not source._in_flight


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_clock_counts_the_updates_between(interval):
    """Rollouts 2 to 5 lie between: an update follows rollout r where interval divides r + 1."""
    clock = WeightClock(version=3, next_rollout_id=2, interval=interval)
    updates = sum((r + 1) % interval == 0 for r in range(2, 6))
    assert clock.trained_by(6) == 3 + updates
    assert clock.trained_by(2) == 3
