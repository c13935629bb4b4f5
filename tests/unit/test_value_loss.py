"""The critic's loss against a loop over tokens, values and gradients."""

import numpy as np
import pytest
import torch

from slime.algorithms.policy_loss import value_loss
from slime.core.batches import add_up
from slime.core.packing import pack, unpack
from slime.core.types import ParallelInfo
from tests.batches import random_batch

CLIP = 0.3


def batch_of_values(per_token=False):
    batch = random_batch(8, seed=4, rows_per_trajectory=2, per_token=per_token)
    rng = np.random.default_rng(0)
    batch.values = [rng.normal(size=n).astype(np.float32) for n in batch.response_lens]
    batch.returns = [rng.normal(size=n).astype(np.float32) for n in batch.response_lens]
    batch.teacher_log_probs = [  # carries the new values through pack
        (v + rng.normal(0, 0.5, len(v))).astype(np.float32) for v in batch.values
    ]
    return batch


def naive(batch, per_token):
    """Loss and its derivative by each value: (v - R) where the plain error counts, else 0."""
    executions, slopes = {}, [np.zeros(n) for n in batch.response_lens]
    for row in range(len(batch)):
        losses = executions.setdefault(int(batch.trajectory_ids[row]), [])
        for t in np.flatnonzero(batch.loss_masks[row]):
            new, old = float(batch.teacher_log_probs[row][t]), float(batch.values[row][t])
            target = float(batch.returns[row][t])
            near = min(max(new, old - CLIP), old + CLIP)
            plain, held = (new - target) ** 2, (near - target) ** 2
            losses.append(max(plain, held) / 2)
            slopes[row][t] = new - target if plain >= held else 0.0
    if per_token:
        every = [loss for losses in executions.values() for loss in losses]
        return sum(every) / len(every), slopes
    means = [sum(losses) / len(losses) for losses in executions.values() if losses]
    return sum(means) / len(executions), slopes


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("spread", [[list(range(8))], [[5, 2], [0, 7, 1], [3], [6, 4]]])
def test_loss_and_gradient_are_those_of_the_loop(spread, per_token):
    batch = batch_of_values(per_token)
    expected, slopes = naive(batch, per_token)
    total, metrics = 0.0, []
    for rows in spread:
        packed = pack(batch, rows, ParallelInfo())
        values = packed.teacher_log_probs.double().requires_grad_()
        output = value_loss(
            values,
            old_values=packed.values,
            returns=packed.returns,
            loss_weights=packed.loss_weights,
            value_clip=CLIP,
        )
        output.loss.backward()
        total += output.loss.item()
        metrics.append(output.metrics)
        for row, grad in zip(rows, unpack(values.grad, packed), strict=True):
            np.testing.assert_allclose(grad, slopes[row] * batch.loss_weights[row], atol=1e-6)
    assert total == pytest.approx(expected, rel=1e-5)
    sums = add_up(metrics)
    assert sums["loss"].total == pytest.approx(total)
    for name, column in (("value", batch.teacher_log_probs), ("return", batch.returns)):
        pairs = zip(batch.loss_weights, column, strict=True)
        assert sums[name].total == pytest.approx(sum(float(w @ x) for w, x in pairs), rel=1e-4)
    clipped = sums["clip_fraction"]
    held = [s == 0 for row, m in zip(slopes, batch.loss_masks, strict=True) for s in row[m > 0]]
    assert 0 < sum(held) < len(held) and 0 < clipped.mean < 1
    if per_token:
        assert clipped.mean == pytest.approx(sum(held) / len(held), rel=1e-5)


@pytest.mark.parametrize(
    ("new", "target", "loss", "slope"),
    [
        (0.2, 1.0, 0.32, -0.8),  # inside the range: (0.2 - 1)^2 / 2
        (0.5, 1.0, 0.245, 0.0),  # gone far enough towards the return: held at 0.3
        (0.5, -1.0, 1.125, 1.5),  # gone the wrong way: the plain error is larger
    ],
)
def test_clip_cases(new, target, loss, slope):
    values, one = torch.tensor([new], dtype=torch.float64, requires_grad=True), torch.ones(1)
    output = value_loss(
        values, old_values=0 * one, returns=target * one, loss_weights=one, value_clip=CLIP
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    assert values.grad.item() == pytest.approx(slope, abs=1e-7)
