import math

import numpy as np
import pytest
import torch

from slime.algorithms.policy_loss import importance_correction, mismatch_metrics
from slime.core.packing import pack, unpack
from slime.core.types import ParallelInfo, Schedule
from tests.batches import random_batch

ROWS = [2, 0, 3, 7, 6, 1]


def naive_weights(batch, row, level):
    """Unbounded importance weight at each response token of one row."""
    gaps = (batch.old_log_probs[row] - batch.rollout_log_probs[row]).tolist()
    trained = [g for g, m in zip(gaps, batch.loss_masks[row], strict=True) if m]
    if level == "token":
        return [math.exp(g) for g in gaps]
    exponent = sum(trained) / (len(trained) if level == "geometric" else 1)
    return [math.exp(exponent)] * len(gaps)


def corrected(batch, level, mode, low, high):
    packed = pack(batch, ROWS, ParallelInfo())
    output = importance_correction(
        pg_loss=packed.advantages,
        old_log_probs=packed.old_log_probs,
        rollout_log_probs=packed.rollout_log_probs,
        loss_mask=packed.loss_mask,
        cu_seqlens=packed.cu_seqlens,
        level=level,
        mode=mode,
        low=low,
        high=high,
    )
    return packed, output


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_equal_the_naive_ones(level, mode):
    low, high = 0.9, 1.2
    batch = random_batch(8, seed=8)
    rng = np.random.default_rng(1)
    batch.rollout_log_probs = [row + rng.normal(0, 0.2, len(row)) for row in batch.old_log_probs]
    packed, output = corrected(batch, level, mode, low, high)
    loss = unpack(output.pg_loss, packed)
    kept = unpack(output.loss_mask, packed)
    outside = unpack(output.metrics["tis_clip_fraction"], packed)
    seen = set()
    for i, row in enumerate(ROWS):
        for t, weight in enumerate(naive_weights(batch, row, level)):
            if not batch.loss_masks[row][t]:
                assert kept[i][t] == 0
                continue
            inside = low <= weight <= high
            seen.add(inside)
            assert outside[i][t] == (not inside)
            if mode == "truncate":
                weight = min(max(weight, low), high)
            assert kept[i][t] == (inside or mode == "truncate")
            expected = weight * batch.advantages[row][t]
            assert loss[i][t] == pytest.approx(expected, rel=1e-5)
    assert seen == {True, False}


def test_the_weight_is_a_constant_for_the_gradient():
    old, rollout = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -1.9])
    pg_loss = torch.tensor([1.0, 1.0], requires_grad=True)
    output = importance_correction(
        pg_loss=pg_loss,
        old_log_probs=old,
        rollout_log_probs=rollout,
        loss_mask=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2]),
    )
    output.pg_loss.sum().backward()
    assert old.grad is None
    torch.testing.assert_close(pg_loss.grad, torch.tensor([math.exp(0.5), math.exp(-0.1)]))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_weight_beyond_all_bounds_is_dropped_without_a_trace(level):
    """Dropped is 0 times its gradient, which must not be 0 times infinity."""
    pg_loss = torch.ones(2, requires_grad=True)
    output = importance_correction(
        pg_loss=pg_loss,
        old_log_probs=torch.tensor([-1.0, -2.0]),
        rollout_log_probs=torch.tensor([-900.0, -900.0]),
        loss_mask=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2]),
        level=level,
        mode="mask",
    )
    assert not output.loss_mask.any()
    torch.where(output.loss_mask > 0, output.pg_loss, 0.0).sum().backward()
    assert pg_loss.grad.tolist() == [0.0, 0.0]
    assert all(column.isfinite().all() for column in output.metrics.values())


def test_equal_log_probs_change_nothing():
    batch = random_batch(8)
    batch.rollout_log_probs = batch.old_log_probs
    for level in ("token", "sequence", "geometric"):
        packed, output = corrected(batch, level, "mask", 1.0, 1.0)
        torch.testing.assert_close(output.pg_loss, packed.advantages)
        torch.testing.assert_close(output.loss_mask, packed.loss_mask)


def test_mismatch_over_owned_rows():
    batch = random_batch(8)
    batch.schedule = Schedule(
        steps=[[[0, 2], [1], [3]]], log_prob_micro_batches=[[0]], dummies=frozenset({(0, 2)})
    )
    batch.old_log_probs[0][batch.loss_masks[0].argmax()] -= 9  # the largest gap is downwards
    sums, maxima = mismatch_metrics(batch, breakdown=True)
    gaps = np.concatenate(
        [
            (batch.old_log_probs[r] - batch.rollout_log_probs[r])[batch.loss_masks[r] > 0]
            for r in (0, 1, 2)
        ]
    )
    assert maxima["log_prob_gap_max"] == pytest.approx(np.abs(gaps).max())
    assert sums["log_prob_gap_mean"].mean == pytest.approx(np.abs(gaps).mean())
    assert sums["mismatch_kl"].mean == pytest.approx((np.exp(gaps) - 1 - gaps).mean(), rel=1e-5)
    assert sums["mismatch_weight"].mean == pytest.approx(np.exp(gaps).mean(), rel=1e-5)
    difference = sums["mismatch_rollout_nll"].total - sums["mismatch_train_nll"].total
    assert difference == pytest.approx(gaps.sum(), rel=1e-5)
    assert sums["mismatch_k1"].total == pytest.approx(-gaps.sum(), rel=1e-5)
    trained = [batch.old_log_probs[r][batch.loss_masks[r] > 0] for r in (0, 1, 2)]
    nll = -np.concatenate(trained).mean()
    assert sums["mismatch_train_nll"].mean == pytest.approx(nll, rel=1e-5)
    assert sums["mismatch_kl"].count == len(gaps)


def test_mismatch_without_both_sides():
    assert mismatch_metrics(random_batch(2, rollout_log_probs=None)) == ({}, {})
