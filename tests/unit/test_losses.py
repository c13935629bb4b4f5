"""What the flags of the loss do to the loss of a micro-batch, against loops over single tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime.backends.losses import TrainHooks, TrainLoss
from slime.core.packing import pack, unpack
from slime.core.types import ParallelInfo
from tests.args import make_args
from tests.batches import random_batch
from tests.naive_losses import N, assert_same, batch_and_log_probs, naive_loss

ROWS = [7, 3, 9, 0, 1, 8, 2, 6, 5, 4]
CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.3}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
TIS = {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5}


def filled_batch():
    batch, rng = batch_and_log_probs(), np.random.default_rng(3)
    for name in ("values", "returns"):
        setattr(batch, name, [rng.normal(size=n).astype(np.float32) for n in batch.response_lens])
    return batch


def ours(batch, role="actor", **flags):
    """Loss, the gradient of each row's outputs and of their entropies, and the metrics."""
    args = make_args(**flags)
    packed = pack(batch, ROWS, ParallelInfo())
    outputs = packed.teacher_log_probs.double().requires_grad_()
    entropy = packed.ref_log_probs.abs().double().requires_grad_()
    if not args.use_opd:
        packed.teacher_log_probs = None
    output = TrainLoss(args, role, TrainHooks(args))(packed, outputs, entropy, None)
    output.loss.backward()
    grads = [np.empty(0)] * N
    for row, grad in zip(ROWS, unpack(outputs.grad, packed), strict=True):
        grads[row] = grad
    return output.loss.item(), grads, entropy.grad, packed


def naive(batch, extra=None, **options):
    leaves = [
        torch.tensor(row, dtype=torch.float64, requires_grad=True)
        for row in batch.teacher_log_probs
    ]
    call = None if extra is None else lambda row, t, pg: extra(leaves[row][t], row, t, pg)
    loss = naive_loss(batch, leaves, extra=call, **{**CLIP, **options})
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return loss.item(), [grad.numpy() for grad in grads]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({**CLIP}, {}),
        ({"eps_clip": 0.1}, {"eps_clip": 0.1, "eps_clip_high": 0.1}),
        (
            {**CLIP, "eps_clip_high": 5.0, "eps_clip_c": 1.2},
            {"eps_clip_high": 5.0, "eps_clip_c": 1.2},
        ),
        ({**CLIP, "advantage_estimator": "cispo"}, {"estimator": "cispo"}),
    ],
)
def test_bounds_of_the_ratio(flags, options):
    batch = filled_batch()
    assert_same(ours(batch, **flags), naive(batch, **options))


@pytest.mark.parametrize(
    ("flags", "kl"),
    [
        ({"kl_loss_type": "k1"}, lambda d, ratio: d),
        ({"kl_loss_type": "k2"}, lambda d, ratio: d**2 / 2),
        ({"kl_loss_type": "k3"}, lambda d, ratio: (-d).exp() - 1 + d),
        ({"kl_loss_type": "k2", "use_unbiased_kl": True}, lambda d, ratio: ratio * d**2 / 2),
    ],
)
def test_kl_to_the_reference(flags, kl):
    batch = filled_batch()

    def with_kl(new, row, t, pg):
        ratio = (new - float(batch.old_log_probs[row][t])).exp()
        return pg + 0.3 * kl(new - float(batch.ref_log_probs[row][t]), ratio)

    assert_same(ours(batch, **CLIP, **KL, **flags), naive(batch, with_kl))


def test_a_reference_that_is_only_there_does_not_pull():
    """--kl-coef makes one, which the rewards have paid for already."""
    batch = filled_batch()
    assert_same(ours(batch, **CLIP, kl_coef=0.2), naive(batch))


def test_entropy():
    batch = filled_batch()
    loss, _, slope, packed = ours(batch, **CLIP, entropy_coef=0.01)
    weighted = float((packed.loss_weights * packed.ref_log_probs.abs()).sum())
    assert loss == pytest.approx(naive(batch)[0] - 0.01 * weighted, rel=1e-5)
    torch.testing.assert_close(slope, -0.01 * packed.loss_weights.double())
    assert ours(batch, **CLIP)[2] is None  # watched, not trained on


def test_ratios_against_the_engine_and_correction_by_it():
    batch = filled_batch()

    def truncated(new, row, t, pg):
        gap = float(batch.old_log_probs[row][t]) - float(batch.rollout_log_probs[row][t])
        return pg * min(max(math.exp(gap), 0.5), 1.5)

    assert_same(ours(batch, **CLIP, **TIS), naive(batch, truncated))
    found = ours(batch, **CLIP, use_rollout_logprobs=True)
    batch.old_log_probs = batch.rollout_log_probs
    assert_same(found, naive(batch))


def test_a_teacher():
    """Its log-probs are the very ones of the policy that learns: the gap is to the old policy."""
    batch = filled_batch()
    opd = {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.5, "rm_url": "http://x"}
    found = ours(batch, **CLIP, **opd)
    rows = zip(batch.advantages, batch.old_log_probs, batch.teacher_log_probs, strict=True)
    batch.advantages = [a - 0.5 * (old - teacher) for a, old, teacher in rows]
    assert_same(found, naive(batch))


def test_supervised():
    batch = filled_batch()
    loss, grads, _, _ = ours(batch, loss_type="sft_loss")
    pairs = list(zip(batch.loss_weights, batch.teacher_log_probs, strict=True))
    assert loss == pytest.approx(-sum(float(w @ x) for w, x in pairs), rel=1e-5)
    for grad, (weights, _) in zip(grads, pairs, strict=True):
        np.testing.assert_allclose(grad, -weights, rtol=1e-6)


def test_the_critic_learns_returns_within_its_own_bound():
    batch = filled_batch()
    loss, grads, _, _ = ours(batch, "critic", advantage_estimator="ppo", value_clip=0.3)
    total = 0.0
    for row in range(N):
        for t, weight in enumerate(batch.loss_weights[row]):
            new, old = float(batch.teacher_log_probs[row][t]), float(batch.values[row][t])
            target = float(batch.returns[row][t])
            near = min(max(new, old - 0.3), old + 0.3)
            plain, held = (new - target) ** 2, (near - target) ** 2
            total += weight * max(plain, held) / 2
            slope = weight * (new - target) if plain >= held else 0.0
            assert grads[row][t] == pytest.approx(slope, rel=1e-4, abs=1e-7)
    assert loss == pytest.approx(total, rel=1e-5)


def squared_logits(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits.square().sum(1)), {"tokens": batch.loss_mask.sum()}


def test_a_loss_of_the_users_is_summed_with_the_weights_of_the_step():
    batch = filled_batch()
    path = f"{__name__}.squared_logits"
    args = make_args(loss_type="custom_loss", custom_loss_function_path=path)
    packed = pack(batch, ROWS, ParallelInfo())
    logits = torch.randn(len(packed.tokens), 5, generator=torch.Generator().manual_seed(0))
    output = TrainLoss(args, "actor", TrainHooks(args)).custom(packed, logits.requires_grad_())
    output.loss.backward()
    torch.testing.assert_close(logits.grad, 2 * logits.detach() * packed.loss_weights[:, None])
    expected = float(packed.loss_weights @ logits.detach().square().sum(1))
    assert output.metrics["loss"].total == pytest.approx(expected, rel=1e-5)
    assert output.metrics["loss"].count == pytest.approx(float(packed.loss_weights.sum()))


def sums_of_samples(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(losses):
        rows = zip(losses.split(response_lengths), loss_masks, strict=True)
        return sum((row * mask).sum() for row, mask in rows)

    return reduce


@pytest.mark.parametrize(("rows", "executions"), [([0, 1, 2, 3], 4), ([5, 4], 2)])
def test_a_reducer_of_the_users_is_a_mean_over_what_its_step_has(rows, executions):
    """Six samples in steps of four: the second step has two."""
    batch = random_batch(6, global_batch_size=4)
    args = make_args(custom_pg_loss_reducer_function_path=f"{__name__}.sums_of_samples")
    packed = pack(batch, rows, ParallelInfo())
    log_probs = packed.old_log_probs.clone().requires_grad_()  # ratios of one
    output = TrainLoss(args, "actor", TrainHooks(args))(packed, log_probs, None, None)
    output.loss.backward()
    expected = sum(-(batch.advantages[row] * batch.loss_masks[row]).sum() for row in rows)
    assert output.loss.item() == pytest.approx(expected / executions, rel=1e-5)
    for row, grad in zip(rows, unpack(log_probs.grad, packed), strict=True):
        naive_grad = -batch.advantages[row] * batch.loss_masks[row] / executions
        np.testing.assert_allclose(grad, naive_grad, rtol=1e-5, atol=1e-7)
