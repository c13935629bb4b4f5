"""Losses of packed micro-batches against loops over single unpacked samples, gradients included."""

import functools
import math

import numpy as np
import pytest
import torch

from slime.algorithms.policy_loss import importance_correction, policy_loss, sft_loss
from slime.core.packing import pack
from slime.core.types import LossInputs, ParallelInfo
from tests.naive_losses import (
    EPS,
    N,
    assert_same,
    batch_and_log_probs,
    loss_inputs,
    naive_loss,
    naive_value_and_gradients,
    packed_value_and_gradients,
    spreads,
)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("estimator", ["grpo", "cispo"])
def test_however_rows_are_spread_loss_and_gradient_are_those_of_the_loop(estimator, per_token):
    batch = batch_and_log_probs(per_token=per_token)
    expected = naive_value_and_gradients(batch, estimator=estimator, per_token=per_token)
    function = functools.partial(policy_loss, estimator=estimator, **EPS)
    for micro_batches in spreads():
        assert_same(packed_value_and_gradients(batch, micro_batches, function), expected)


def test_gspo_uses_the_ratio_of_the_sequence():
    """The loop differentiates the paper's eq. 5, where a sequence's advantage is one number."""
    batch = batch_and_log_probs()
    batch.advantages = [np.full(len(a), a[0]) for a in batch.advantages]
    expected = naive_value_and_gradients(batch, estimator="gspo")
    function = functools.partial(policy_loss, estimator="gspo", **EPS)
    for micro_batches in spreads():
        assert_same(packed_value_and_gradients(batch, micro_batches, function), expected)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    batch = batch_and_log_probs()
    options = {**EPS, "eps_clip_high": 5.0, "eps_clip_c": 1.2}
    expected = naive_value_and_gradients(batch, **options)
    unbounded = naive_value_and_gradients(batch, **{**options, "eps_clip_c": None})
    assert expected[0] < unbounded[0] - 1e-3
    function = functools.partial(policy_loss, **options)
    assert_same(packed_value_and_gradients(batch, [list(range(N))], function), expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, 0),  # inside: -r A, and d/dlogp = -r A
        (1.5, 2.0, -1.3 * 2.0, 0.0, 1),  # good and already likelier: held at 1 + high
        (1.5, -2.0, 3.0, 3.0, 0),  # bad and likelier: full gradient
        (0.5, -2.0, 0.8 * 2.0, 0.0, 1),  # bad and already rarer: held at 1 - low
        (0.5, 2.0, -1.0, -1.0, 0),  # good but rarer: full gradient
    ],
)
def test_clip_cases(ratio, advantage, loss, slope, clipped):
    log_probs = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    output = policy_loss(
        LossInputs(
            log_probs=log_probs,
            loss_mask=one,
            loss_weights=one,
            cu_seqlens=torch.tensor([0, 1]),
            advantages=advantage * one,
            old_log_probs=-one,
        ),
        **EPS,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    assert log_probs.grad.item() == pytest.approx(slope, abs=1e-12)
    assert output.metrics["clip_fraction"].mean == clipped
    assert output.metrics["ppo_kl"].mean == pytest.approx(-math.log(ratio))


def test_upper_bound_defaults_to_the_lower_one():
    batch = batch_and_log_probs()
    rows = [list(range(N))]
    ours = packed_value_and_gradients(batch, rows, functools.partial(policy_loss, eps_clip=0.1))
    assert_same(ours, naive_value_and_gradients(batch, eps_clip=0.1, eps_clip_high=0.1))


def test_without_old_log_probs_the_gradient_is_plain_policy_gradient():
    batch = batch_and_log_probs()
    _, grads, metrics = packed_value_and_gradients(
        batch, [list(range(N))], policy_loss, columns=lambda packed: {"old_log_probs": None}
    )
    for row in range(N):
        weights = batch.loss_weights[row]
        np.testing.assert_allclose(grads[row], -weights * batch.advantages[row], rtol=1e-5)
    assert metrics["ppo_kl"].total == 0 and metrics["clip_fraction"].total == 0


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_term(kind, unbiased):
    batch = batch_and_log_probs()
    terms = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: (-d).exp() - 1 + d,
        "low_var_kl": lambda d: ((-d).exp() - 1 + d).clamp(max=10),
    }
    leaves = [
        torch.tensor(r, dtype=torch.float64, requires_grad=True) for r in batch.teacher_log_probs
    ]

    def with_kl(row, t, pg):
        kl = terms[kind](leaves[row][t] - float(batch.ref_log_probs[row][t]))
        if unbiased:
            kl = kl * (leaves[row][t] - float(batch.old_log_probs[row][t])).exp()
        return pg + 0.3 * kl

    loss = naive_loss(batch, leaves, extra=with_kl)
    grads = [g.numpy() for g in torch.autograd.grad(loss, leaves, materialize_grads=True)]
    ours = packed_value_and_gradients(
        batch,
        [[7, 3], [9, 0, 1, 8], [2], [6, 5, 4]],
        functools.partial(
            policy_loss, kl_loss_coef=0.3, kl_loss_type=kind, use_unbiased_kl=unbiased, **EPS
        ),
        columns=lambda packed: {"ref_log_probs": packed.ref_log_probs},
    )
    assert_same(ours, (loss.item(), grads))
    plain = naive_loss(batch, leaves).item()
    weight = sum(w.sum() for w in batch.loss_weights)
    assert ours[2]["kl_loss"].total == pytest.approx((loss.item() - plain) / 0.3, rel=1e-4)
    assert ours[2]["kl_loss"].count == pytest.approx(weight)


def test_entropy_is_rewarded():
    batch = batch_and_log_probs()
    packed = pack(batch, list(range(N)), ParallelInfo())
    entropy = (packed.rollout_log_probs.abs() * packed.loss_mask).requires_grad_()
    log_probs = packed.teacher_log_probs
    without = policy_loss(loss_inputs(packed, log_probs=log_probs), **EPS)
    output = policy_loss(
        loss_inputs(packed, log_probs=log_probs, entropy=entropy), entropy_coef=0.01, **EPS
    )
    weighted = sum(
        float(w @ np.abs(r))
        for w, r in zip(batch.loss_weights, batch.rollout_log_probs, strict=True)
    )
    assert (without.loss - output.loss).item() == pytest.approx(0.01 * weighted, rel=1e-4)
    assert output.metrics["entropy"].total == pytest.approx(weighted, rel=1e-5)
    (grad,) = torch.autograd.grad(output.loss, entropy)
    torch.testing.assert_close(grad, -0.01 * packed.loss_weights)


def test_entropy_that_is_only_watched_costs_no_backward_pass():
    packed = pack(batch_and_log_probs(), [0, 1], ParallelInfo())
    entropy = packed.loss_mask.clone().requires_grad_()
    log_probs = packed.teacher_log_probs.requires_grad_()
    policy_loss(loss_inputs(packed, log_probs=log_probs, entropy=entropy)).loss.backward()
    assert entropy.grad is None and log_probs.grad is not None


def test_ratios_against_the_engine():
    batch = batch_and_log_probs()
    rows = [list(range(N))]
    ours = packed_value_and_gradients(
        batch, rows, functools.partial(policy_loss, use_rollout_logprobs=True, **EPS)
    )
    batch.old_log_probs = batch.rollout_log_probs
    assert_same(ours, naive_value_and_gradients(batch))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_correction_weights_the_policy_gradient_only(mode, level):
    batch = batch_and_log_probs()
    low, high = 0.5, 1.5

    def corrected(row, t, pg):
        gaps = batch.old_log_probs[row].astype(float) - batch.rollout_log_probs[row]
        weight = math.exp(gaps[t] if level == "token" else gaps[batch.loss_masks[row] > 0].sum())
        if mode == "mask":
            return pg * (weight if low <= weight <= high else 0.0)
        return pg * min(max(weight, low), high)

    expected = naive_value_and_gradients(batch, extra=corrected)
    correction = functools.partial(
        importance_correction, mode=mode, low=low, high=high, level=level
    )
    function = functools.partial(policy_loss, correction=correction, **EPS)
    for micro_batches in spreads():
        *ours, metrics = packed_value_and_gradients(batch, micro_batches, function)
        assert_same(ours, expected)
        assert 0 < metrics["tis_clip_fraction"].mean < 1


@pytest.mark.parametrize(
    ("estimator", "eps_clip_c"), [("grpo", None), ("grpo", 1.05), ("cispo", None)]
)
def test_clip_fraction_is_the_share_of_tokens_that_a_bound_replaced(estimator, eps_clip_c):
    """Of PPO only the side that would gain more; of CISPO both; a dual clip counts as well."""
    batch = batch_and_log_probs(per_token=True)
    replaced = []
    for row in range(N):
        for t in np.flatnonzero(batch.loss_masks[row]):
            ratio = math.exp(batch.teacher_log_probs[row][t] - batch.old_log_probs[row][t])
            advantage = batch.advantages[row][t]
            over, under = ratio > 1.3, ratio < 0.8
            if estimator == "cispo":
                replaced.append(over or under)
                continue
            dual = eps_clip_c is not None and advantage < 0 and ratio > eps_clip_c
            replaced.append((over and advantage > 0) or (under and advantage < 0) or dual)
    function = functools.partial(policy_loss, estimator=estimator, eps_clip_c=eps_clip_c, **EPS)
    metrics = packed_value_and_gradients(batch, [list(range(N))], function)[2]
    assert metrics["clip_fraction"].mean == pytest.approx(np.mean(replaced), rel=1e-5)


def test_a_teacher_moves_the_advantage_by_its_gap_to_the_old_policy():
    """A_t - c (log p_old - log p_teacher), a constant for the gradient."""
    batch = batch_and_log_probs()
    teacher = batch.rollout_log_probs
    gaps = [old - row for old, row in zip(batch.old_log_probs, teacher, strict=True)]
    *ours, metrics = packed_value_and_gradients(
        batch,
        [[7, 3], [9, 0, 1, 8], [2], [6, 5, 4]],
        functools.partial(policy_loss, opd_kl_coef=0.4, **EPS),
        columns=lambda packed: {"teacher_log_probs": packed.rollout_log_probs},
    )
    pairs = zip(batch.loss_weights, gaps, strict=True)
    assert metrics["opd_kl"].total == pytest.approx(sum(float(w @ g) for w, g in pairs), rel=1e-4)
    batch.advantages = [a - 0.4 * g for a, g in zip(batch.advantages, gaps, strict=True)]
    assert_same(ours, naive_value_and_gradients(batch))


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_what_stands_at_tokens_that_are_not_trained_does_not_matter(estimator):
    batch = batch_and_log_probs()
    rows = [list(range(N))]
    function = functools.partial(policy_loss, estimator=estimator, **EPS)
    plain = packed_value_and_gradients(batch, rows, function)
    for old, mask in zip(batch.old_log_probs, batch.loss_masks, strict=True):
        old[mask == 0] = np.nan
    assert_same(packed_value_and_gradients(batch, rows, function), plain[:2])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_a_correction_ignores_tokens_that_are_not_trained(estimator, level):
    """A hook may record None as the log-prob of tool output, which is NaN in a batch."""
    batch = batch_and_log_probs()
    rows = [list(range(N))]
    correction = functools.partial(importance_correction, level=level)
    function = functools.partial(policy_loss, estimator=estimator, correction=correction, **EPS)
    *plain, metrics = packed_value_and_gradients(batch, rows, function)
    for column, mask in zip(batch.rollout_log_probs, batch.loss_masks, strict=True):
        column[mask == 0] = np.nan
    *found, found_metrics = packed_value_and_gradients(batch, rows, function)
    assert_same(found, plain)
    assert found_metrics == metrics


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_a_ratio_beyond_all_bounds_stays_finite(gap, estimator):
    one = torch.ones(1)
    log_probs = torch.tensor([-1.0], requires_grad=True)
    inputs = LossInputs(
        log_probs=log_probs,
        loss_mask=one,
        loss_weights=one,
        cu_seqlens=torch.tensor([0, 1]),
        advantages=-one,
        old_log_probs=-gap * one,
        ref_log_probs=-one,
    )
    output = policy_loss(
        inputs, estimator=estimator, kl_loss_coef=0.1, kl_loss_type="k2", use_unbiased_kl=True
    )
    output.loss.backward()
    assert output.loss.isfinite() and log_probs.grad.isfinite().all()


def test_a_reducer_of_the_users_sums_the_policy_gradient():
    batch = batch_and_log_probs()
    packed = pack(batch, [0, 1], ParallelInfo())
    inputs = loss_inputs(packed, log_probs=packed.teacher_log_probs.requires_grad_())
    everything = LossInputs(**{**vars(inputs), "loss_weights": packed.loss_mask})
    ours = policy_loss(inputs, reduce_pg=lambda x: (x * packed.loss_mask).sum() / 7, **EPS)
    theirs = policy_loss(everything, **EPS)
    assert ours.loss.item() == pytest.approx(theirs.loss.item() / 7)
    slopes = [torch.autograd.grad(x.loss, inputs.log_probs)[0] for x in (ours, theirs)]
    torch.testing.assert_close(slopes[0], slopes[1] / 7)
    assert ours.metrics["pg_loss"].total == pytest.approx(ours.loss.item())


def test_metrics_are_the_same_however_rows_are_spread():
    batch = batch_and_log_probs()
    every = [
        packed_value_and_gradients(batch, micro_batches, functools.partial(policy_loss, **EPS))[2]
        for micro_batches in spreads()
    ]
    for metrics in every[1:]:
        assert metrics.keys() == every[0].keys()
        for name, value in metrics.items():
            assert value.mean == pytest.approx(every[0][name].mean, rel=1e-5, abs=1e-7)
    assert every[0]["loss"].total == pytest.approx(naive_value_and_gradients(batch)[0], rel=1e-5)


def test_a_dummy_micro_batch_has_no_loss_but_a_gradient_of_zero():
    packed = pack(batch_and_log_probs(), [0, 1], ParallelInfo(), dummy=True)
    for estimator in ("grpo", "gspo", "cispo"):
        log_probs = torch.zeros(len(packed.tokens), requires_grad=True)
        output = policy_loss(loss_inputs(packed, log_probs=log_probs), estimator=estimator, **EPS)
        output.loss.backward()
        assert output.loss.item() == 0 and not log_probs.grad.any()
        assert output.metrics["loss"].count == 0


@pytest.mark.parametrize("per_token", [False, True])
def test_sft_loss_is_negative_log_likelihood(per_token):
    batch = batch_and_log_probs(per_token=per_token)
    executions = {}
    for row in range(N):
        kept = batch.teacher_log_probs[row][batch.loss_masks[row] > 0]
        executions.setdefault(int(batch.trajectory_ids[row]), []).extend((-kept).tolist())
    if per_token:
        expected = np.mean([x for rows in executions.values() for x in rows])
    else:
        expected = np.mean([np.mean(rows) for rows in executions.values()])
    for micro_batches in spreads():
        loss, grads, metrics = packed_value_and_gradients(
            batch, micro_batches, sft_loss, lambda packed: {"entropy": -packed.old_log_probs}
        )
        assert loss == pytest.approx(expected, rel=1e-5)
        assert metrics["loss"].mean == pytest.approx(expected, rel=1e-5)
        pairs = zip(batch.loss_weights, batch.old_log_probs, strict=True)
        assert metrics["entropy"].total == pytest.approx(-sum(float(w @ x) for w, x in pairs))
        for row in range(N):
            np.testing.assert_allclose(grads[row], -batch.loss_weights[row], rtol=1e-6)


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("advantages", {}),
        ("rollout_log_probs", {"use_rollout_logprobs": True}),
        ("rollout_log_probs", {"correction": importance_correction}),
    ],
)
def test_a_missing_column_is_named(missing, options):
    packed = pack(batch_and_log_probs(), [0, 1], ParallelInfo())
    inputs = loss_inputs(packed, log_probs=packed.teacher_log_probs, **{missing: None})
    with pytest.raises(ValueError, match=missing):
        policy_loss(inputs, **options)
