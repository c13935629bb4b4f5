"""Which tokens are too old to be trained on, counted one by one."""

from __future__ import annotations

import numpy as np
import pytest

from slime.core.types import Sample
from slime.rollout.context import WeightClock
from slime.rollout.samples import is_too_stale, limit_staleness
from tests.args import make_args

VERSIONS = [[3, 3, 4, 5], [5, 5], [2, 4, 4], [5]]


def groups_of(versions=VERSIONS, **fields) -> list[list[Sample]]:
    samples = [
        Sample(
            tokens=list(range(1 + len(row))),
            response_length=len(row),
            weight_versions=list(row),
            **fields,
        )
        for row in versions
    ]
    return [samples[:2], samples[2:]]


def masks(groups):
    return [sample.loss_mask for group in groups for sample in group]


def flags(**values):
    return make_args().replace(**values)


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 1, 2, 5])
def test_the_clock_counts_one_update_after_another(start, interval):
    clock, version = WeightClock(version=7, next_rollout_id=start, interval=interval), 7
    for rollout_id in range(start, start + 9):
        assert clock.trained_by(rollout_id) == version
        version += (rollout_id + 1) % interval == 0
    assert clock.trained_by(start - 1) == 7  # what is past is trained on by what is here now


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("trained_by", [None, 5, 6])
def test_tokens_older_than_allowed_leave_the_loss(limit, trained_by):
    """Without a clock the newest version of all stands for the one that will train on them."""
    newest = 5 if trained_by is None else trained_by
    clock = WeightClock(version=trained_by, next_rollout_id=2)
    groups = groups_of()
    groups[0][0].loss_mask = [0, 1, 1, 0]  # a token of a tool's among them
    before = [[0, 1, 1, 0], [1, 1], [1, 1, 1], [1]]
    metrics = limit_staleness(flags(max_weight_staleness=limit), 2, groups, clock)
    masked = 0
    for sample, mask, row in zip([s for g in groups for s in g], before, VERSIONS, strict=True):
        kept = [int(m and newest - v <= limit) for m, v in zip(mask, row, strict=True)]
        masked += sum(mask) - sum(kept)
        assert (sample.loss_mask or [1] * len(row)) == kept
    every = [newest - v for row in VERSIONS for v in row]
    assert metrics == {
        "rollout/staleness_mean": pytest.approx(np.mean(every)),
        "rollout/staleness_max": max(every),
        "rollout/masked_stale_tokens": masked,
    }


@pytest.mark.parametrize("trained_by", [None, 6])
def test_off_policy_tokens_are_those_of_other_weights_than_the_last_that_generated(trained_by):
    clock = WeightClock(version=trained_by, next_rollout_id=0)
    groups = groups_of()
    limit_staleness(flags(mask_offpolicy_in_partial_rollout=True), 0, groups, clock)
    assert masks(groups) == [[0, 0, 0, 1], None, [0, 0, 0], None]


def test_nothing_is_masked_or_said_where_nothing_is_old_or_known():
    groups = groups_of([[5, 5], [5]])
    assert limit_staleness(flags(max_weight_staleness=0), 0, groups, WeightClock()) == {}
    unknown = groups_of()
    for group in unknown:
        for sample in group:
            sample.weight_versions = sample.weight_versions[1:]  # a hook that did not keep count
    assert limit_staleness(flags(max_weight_staleness=0), 0, unknown, WeightClock()) == {}
    assert masks(groups) == [None] * 2 and masks(unknown) == [None] * 4


def test_old_tokens_are_only_reported_without_a_limit():
    groups = groups_of()
    metrics = limit_staleness(flags(), 0, groups, WeightClock())
    assert metrics["rollout/staleness_max"] == 3 and "rollout/masked_stale_tokens" not in metrics
    assert masks(groups) == [None] * 4


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_a_group_is_too_old_when_one_response_has_no_token_left(limit):
    """Trained on by version 6: the newest token of the third response, of 4, is two behind."""
    args = flags(max_weight_staleness=limit)
    young, old = groups_of()
    clock = WeightClock()
    assert not is_too_stale(args, 2, old, clock)  # the version that will train on it is not known
    clock.set(6, 2)
    assert is_too_stale(args, 2, old, clock) == (limit < 2)
    assert is_too_stale(args, 2, young, clock) == (limit < 1)
    assert not is_too_stale(flags(), 2, old, clock)
