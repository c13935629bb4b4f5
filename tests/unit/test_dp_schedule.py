import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.core.dp_schedule import loss_weights, make_schedule, steps_of_rows, trained_rows


@st.composite
def schedule_inputs(draw):
    num_rows = draw(st.integers(1, 40))
    return {
        "total_lens": draw(st.lists(st.integers(2, 60), min_size=num_rows, max_size=num_rows)),
        "trajectory_ids": draw(st.lists(st.integers(0, 30), min_size=num_rows, max_size=num_rows)),
        "dp_size": draw(st.integers(1, 6)),
        "global_batch_size": draw(st.integers(1, 20)),
        "micro_batch_size": draw(st.integers(1, 4)),
        "max_tokens": draw(st.none() | st.integers(10, 120)),
        "log_probs_max_tokens": draw(st.none() | st.integers(10, 120)),
        "balance": draw(st.booleans()),
        "cp_size": draw(st.sampled_from([1, 2, 3])),
    }


def micro_batches(rows, schedule, step):
    """(global rows, whether a dummy) of each micro-batch of a step; step -1 is the log-prob pass."""
    listed = schedule.log_prob_micro_batches if step == -1 else schedule.steps[step]
    return [
        ([rows[local] for local in mb], (step, number) in schedule.dummies)
        for number, mb in enumerate(listed)
    ]


def steps_by_hand(trajectory_ids, global_batch_size):
    seen = []
    for rollout_id in trajectory_ids:
        if rollout_id not in seen:
            seen.append(rollout_id)
    return [seen.index(rollout_id) // global_batch_size for rollout_id in trajectory_ids]


@settings(deadline=None, max_examples=150)
@given(inputs=schedule_inputs())
def test_every_row_counts_once_in_its_step_and_ranks_keep_pace(inputs):
    schedules = make_schedule(**inputs)
    steps = steps_by_hand(inputs["trajectory_ids"], inputs["global_batch_size"])
    num_rows, num_steps = len(steps), max(steps) + 1
    assert len(schedules) == inputs["dp_size"]
    for step in [-1, *range(num_steps)]:
        per_rank = [micro_batches(rows, schedule, step) for rows, schedule in schedules]
        assert len({len(mbs) for mbs in per_rank}) == 1
        counted = Counter(r for mbs in per_rank for mb, dummy in mbs if not dummy for r in mb)
        wanted = range(num_rows) if step == -1 else [r for r in range(num_rows) if steps[r] == step]
        assert counted == Counter(wanted)
        assert all(mb for mbs in per_rank for mb, _ in mbs)
    assert all(len(schedule.steps) == num_steps for _, schedule in schedules)


@settings(deadline=None, max_examples=150)
@given(inputs=schedule_inputs())
def test_micro_batches_keep_to_their_budget(inputs):
    schedules = make_schedule(**inputs)
    cp_size = inputs["cp_size"]
    unit = 2 * cp_size if cp_size > 1 else 1
    lens = [-(-n // unit) * unit for n in inputs["total_lens"]]
    train_budget = inputs["max_tokens"]
    forward_budget = inputs["log_probs_max_tokens"] or train_budget
    for rows, schedule in schedules:
        for step in [-1, *range(len(schedule.steps))]:
            budget = forward_budget if step == -1 else train_budget
            for mb, _ in micro_batches(rows, schedule, step):
                if budget is None:
                    assert len(mb) <= inputs["micro_batch_size"]
                else:
                    assert len(mb) == 1 or sum(lens[r] for r in mb) <= budget * cp_size


@settings(deadline=None, max_examples=100)
@given(inputs=schedule_inputs())
def test_dummy_micro_batches_repeat_a_row_of_the_rank_and_rows_of_ranks_are_disjoint(inputs):
    schedules = make_schedule(**inputs)
    num_rows = len(inputs["total_lens"])
    owned = []
    for rows, schedule in schedules:
        mine = [rows[local] for local in trained_rows(schedule, len(rows))]
        owned += mine
        assert rows == sorted(set(rows))
        assert set(mine) == set(rows) or (not mine and len(rows) == 1)
        for step, number in schedule.dummies:
            listed = schedule.log_prob_micro_batches if step == -1 else schedule.steps[step]
            (repeated,) = listed[number]
            lens = [inputs["total_lens"][row] for row in rows]
            unit = 2 * inputs["cp_size"] if inputs["cp_size"] > 1 else 1
            assert -(-lens[repeated] // unit) == -(-min(lens) // unit)
    assert sorted(owned) == list(range(num_rows))


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_without_a_budget_micro_batches_are_full_where_counts_divide(balance, dp_size):
    lens = np.random.default_rng(0).integers(2, 50, 48).tolist()
    schedules = make_schedule(
        lens,
        range(48),
        dp_size=dp_size,
        global_batch_size=24,
        micro_batch_size=3,
        max_tokens=None,
        balance=balance,
    )
    for _, schedule in schedules:
        assert [[len(mb) for mb in step] for step in schedule.steps] == [[3] * (8 // dp_size)] * 2
        assert not schedule.dummies


def test_without_balance_rows_are_dealt_in_order():
    (first, left), (second, right) = make_schedule(
        [5] * 8, range(8), dp_size=2, global_batch_size=4, micro_batch_size=1, max_tokens=10
    )
    assert (first, second) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert left.steps == right.steps == [[[0, 1]], [[2, 3]]]


def test_balance_evens_out_ranks_and_micro_batches():
    lens = np.random.default_rng(1).lognormal(5, 1, 256).astype(int).clip(10, 2000).tolist()
    options = {
        "dp_size": 4,
        "global_batch_size": 256,
        "micro_batch_size": 1,
        "max_tokens": 4000,
    }

    def spread(balance):
        loads = [
            [sum(lens[rows[r]] for r in mb) for mb in schedule.steps[0]]
            for rows, schedule in make_schedule(lens, range(256), balance=balance, **options)
        ]
        totals = [sum(rank) for rank in loads]
        slowest = sum(max(side_by_side) for side_by_side in zip(*loads, strict=True))
        return max(totals) / min(totals), slowest / (sum(totals) / 4)

    ranks, lockstep = spread(True)
    assert ranks < 1.02 and lockstep < 1.02
    assert spread(False)[1] > 1.05  # the inputs are such that it matters


def test_the_heavier_of_a_pair_goes_to_the_rank_with_less():
    schedules = make_schedule(
        [9, 5, 8, 4],
        range(4),
        dp_size=2,
        global_batch_size=4,
        micro_batch_size=1,
        max_tokens=None,
        balance=True,
    )
    assert [rows for rows, _ in schedules] == [[0, 3], [1, 2]]  # 9 + 4 and 8 + 5


def one_step(lens, *, max_tokens, dp_size=1):
    """All rows in one step, packed by tokens."""
    options = {"micro_batch_size": 1, "max_tokens": max_tokens, "balance": True}
    return make_schedule(
        lens, range(len(lens)), dp_size=dp_size, global_batch_size=len(lens), **options
    )


def test_no_more_micro_batches_than_the_tokens_need():
    """Rows that fill the budget exactly when paired well: 6+4, 6+4, ... on two ranks."""
    schedules = one_step([6, 6, 6, 6, 4, 4, 4, 4], max_tokens=10, dp_size=2)
    assert [len(schedule.steps[0]) for _, schedule in schedules] == [2, 2]


def test_one_micro_batch_more_where_the_tokens_do_not_fit_as_they_are():
    """20 tokens with 10 each, but 6 and four times 3 and 2 make no two tens: three, and not four."""
    ((_, schedule),) = one_step([6, 3, 3, 3, 3, 2], max_tokens=10)
    assert len(schedule.steps[0]) == 3


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_rows_that_are_an_exact_part_of_the_budget_fill_it(parts):
    ((_, schedule),) = one_step([12 // parts] * (2 * parts), max_tokens=12)
    assert [len(mb) for mb in schedule.steps[0]] == [parts, parts]


@pytest.mark.parametrize("balance", [False, True])
def test_context_ranks_share_a_micro_batch_and_each_has_its_budget(balance):
    """Two rows of 8 are 8 tokens on each of two context ranks: one micro-batch with 8 tokens per GPU."""
    options = {"dp_size": 1, "global_batch_size": 2, "micro_batch_size": 1, "balance": balance}
    ((_, schedule),) = make_schedule([8, 8], range(2), max_tokens=8, cp_size=2, **options)
    assert schedule.steps == [[[0, 1]]] and schedule.log_prob_micro_batches == [[0, 1]]
    ((_, schedule),) = make_schedule([8, 8], range(2), max_tokens=7, cp_size=2, **options)
    assert sorted(schedule.steps[0]) == [[0], [1]]


def test_a_row_over_the_budget_stands_alone():
    ((_, schedule),) = make_schedule(
        [50, 4, 4],
        range(3),
        dp_size=1,
        global_batch_size=3,
        micro_batch_size=1,
        max_tokens=10,
        balance=True,
    )
    assert sorted(schedule.steps[0]) == [[0], [1, 2]]


def test_ranks_without_rows_are_lent_the_shortest():
    schedules = make_schedule(
        [9, 4], [0, 1], dp_size=4, global_batch_size=2, micro_batch_size=1, max_tokens=None
    )
    assert sorted(rows for rows, _ in schedules) == [[0], [1], [1], [1]]
    lent = [(rows, s) for rows, s in schedules if s.dummies]
    assert [rows for rows, _ in lent] == [[1], [1]]
    assert all(s.dummies == {(0, 0), (-1, 0)} and not trained_rows(s, 1) for _, s in lent)


def test_without_a_schedule_every_row_counts():
    assert trained_rows(None, 3) == [0, 1, 2]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        make_schedule([], [], dp_size=1, global_batch_size=1, micro_batch_size=1, max_tokens=None)


def test_thousands_of_rows_take_no_time():
    lens = np.random.default_rng(0).integers(100, 8000, 4096).tolist()
    start = time.thread_time()  # of this thread alone: a busy machine does not count
    for balance in (False, True):
        make_schedule(
            lens,
            range(4096),
            dp_size=16,
            global_batch_size=4096,
            micro_batch_size=1,
            max_tokens=9000,
            balance=balance,
        )
    assert time.thread_time() - start < 5


def test_steps_follow_first_appearance():
    assert steps_of_rows([7, 7, 5, 9], 2).tolist() == [0, 0, 0, 1]
    assert steps_of_rows([3, 1, 3, 2, 1], 1).tolist() == [0, 1, 0, 2, 1]


def naive_loss_weights(masks, trajectory_ids, global_batch_size, per_token):
    steps = steps_by_hand(trajectory_ids, global_batch_size)
    weights = []
    for row, mask in enumerate(masks):
        step_rows = [r for r in range(len(masks)) if steps[r] == steps[row]]
        execution_rows = [r for r in step_rows if trajectory_ids[r] == trajectory_ids[row]]
        of_step = sum(int(m) for r in step_rows for m in masks[r])
        of_execution = sum(int(m) for r in execution_rows for m in masks[r])
        executions = len({trajectory_ids[r] for r in step_rows})
        divisor = of_step if per_token else of_execution * executions
        weights.append([int(m) / divisor if m else 0.0 for m in mask])
    return weights


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10_000), per_token=st.booleans(), batch=st.integers(1, 8))
def test_loss_weights_equal_the_naive_ones(seed, per_token, batch):
    rng = np.random.default_rng(seed)
    trajectory_ids = rng.integers(0, 6, 12).tolist()
    masks = [(rng.random(rng.integers(1, 6)) < 0.6).astype(np.int8) for _ in trajectory_ids]
    ours = loss_weights(masks, trajectory_ids, global_batch_size=batch, per_token=per_token)
    naive = naive_loss_weights(masks, trajectory_ids, batch, per_token)
    for a, b in zip(ours, naive, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_execution_without_trained_tokens_counts_as_an_execution():
    weights = loss_weights(
        [np.array([1, 1]), np.array([0])], [0, 1], global_batch_size=2, per_token=False
    )
    assert [w.tolist() for w in weights] == [[0.25, 0.25], [0.0]]
    weights = loss_weights(
        [np.array([1, 1]), np.array([0])], [0, 1], global_batch_size=2, per_token=True
    )
    assert [w.tolist() for w in weights] == [[0.5, 0.5], [0.0]]
