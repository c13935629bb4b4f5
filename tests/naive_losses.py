"""The policy loss as loops over single unpacked samples, and ours over any spread of rows, to compare them."""

import numpy as np
import pytest
import torch

from slime.core.batches import add_up
from slime.core.dp_schedule import make_schedule
from slime.core.packing import pack, unpack
from slime.core.types import LossInputs, ParallelInfo
from tests.batches import random_batch

N = 10
EPS = {"eps_clip": 0.2, "eps_clip_high": 0.3}


def batch_and_log_probs(seed=0, per_token=False):
    """A batch of one step, and the policy's own log-probs of it, near the old ones."""
    batch = random_batch(N, seed=seed, rows_per_trajectory=2, per_token=per_token)
    rng = np.random.default_rng(seed + 1)
    batch.teacher_log_probs = [  # carries the new log-probs through pack
        (row + rng.normal(0, 0.3, len(row))).astype(np.float32) for row in batch.old_log_probs
    ]
    return batch


# ---- the naive side: one sample at a time, one token at a time


def naive_pg(new, old, advantage, mask, estimator, eps_clip, eps_clip_high, eps_clip_c=None):
    """Policy-gradient losses of one row's trained tokens; `new` is a list of scalar tensors."""
    trained = [t for t, m in enumerate(mask) if m]
    ratios = {t: (new[t] - float(old[t])).exp() for t in trained}
    if estimator == "gspo" and trained:
        mean = sum(new[t] - float(old[t]) for t in trained) / len(trained)
        ratios = {t: mean.exp() for t in trained}
    losses = {}
    for t in trained:
        a, r = float(advantage[t]), ratios[t]
        low, high = 1 - eps_clip, 1 + eps_clip_high
        bounded = r if low <= r.item() <= high else torch.tensor(min(max(r.item(), low), high))
        if estimator == "cispo":
            losses[t] = -bounded.item() * a * new[t]
            continue
        loss = -min(r * a, bounded * a, key=lambda x: x.item())
        if eps_clip_c is not None and a < 0 and loss.item() > -eps_clip_c * a:
            loss = torch.tensor(-eps_clip_c * a)
        losses[t] = loss
    return losses


def naive_loss(batch, new, *, estimator="grpo", per_token=False, extra=None, **options):
    """Mean over executions of the mean over their trained tokens, or mean over all trained tokens."""
    executions = {}
    for row in range(N):
        mask, advantage = batch.loss_masks[row], batch.advantages[row]
        losses = naive_pg(
            new[row], batch.old_log_probs[row], advantage, mask, estimator, **{**EPS, **options}
        )
        if extra is not None:
            losses = {t: extra(row, t, loss) for t, loss in losses.items()}
        executions.setdefault(int(batch.trajectory_ids[row]), []).extend(losses.values())
    if per_token:
        everything = [loss for losses in executions.values() for loss in losses]
        return sum(everything) / len(everything)
    means = [sum(losses) / len(losses) if losses else 0.0 for losses in executions.values()]
    return sum(means) / len(means)


def naive_value_and_gradients(batch, **options):
    leaves = [
        torch.tensor(row, dtype=torch.float64, requires_grad=True)
        for row in batch.teacher_log_probs
    ]
    loss = naive_loss(batch, leaves, **options)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.item(), [
        np.zeros(len(leaf)) if g is None else g.numpy()
        for g, leaf in zip(grads, leaves, strict=True)
    ]


# ---- our side: any spread of rows over micro-batches


def loss_inputs(packed, **changes):
    columns = {
        "loss_mask": packed.loss_mask,
        "loss_weights": packed.loss_weights,
        "cu_seqlens": packed.cu_seqlens,
        "advantages": packed.advantages,
        "old_log_probs": packed.old_log_probs,
        "rollout_log_probs": packed.rollout_log_probs,
    }
    return LossInputs(**{**columns, **changes})


def packed_value_and_gradients(batch, micro_batches, loss_function, columns=lambda packed: {}):
    """Sum of the losses of all micro-batches; the gradient of each row's log-probs."""
    total, grads, metrics = 0.0, [None] * N, []
    for rows in micro_batches:
        packed = pack(batch, rows, ParallelInfo())
        log_probs = (packed.teacher_log_probs * packed.loss_mask).double().requires_grad_()
        output = loss_function(loss_inputs(packed, log_probs=log_probs, **columns(packed)))
        output.loss.backward()
        total += output.loss.item()
        metrics.append(output.metrics)
        for row, grad in zip(rows, unpack(log_probs.grad, packed), strict=True):
            grads[row] = grad
    return total, grads, add_up(metrics)


def spreads():
    """Ways to lay ten rows out: alone, all at once, shuffled, and by schedules over several ranks."""
    yield [[row] for row in range(N)]
    yield [list(range(N))]
    yield [[7, 3], [9, 0, 1, 8], [2], [6, 5, 4]]
    lens = random_batch(N).total_lens
    for dp_size, balance in ((1, True), (3, True), (4, False)):
        ranks = make_schedule(
            lens,
            range(N),
            dp_size=dp_size,
            global_batch_size=N,
            micro_batch_size=1,
            max_tokens=40,
            balance=balance,
        )
        yield [
            [rows[r] for r in mb]
            for rows, schedule in ranks
            for number, mb in enumerate(schedule.steps[0])
            if (0, number) not in schedule.dummies
        ]


def assert_same(ours, expected):
    value, grads = expected
    assert ours[0] == pytest.approx(value, rel=1e-5, abs=1e-7)
    for a, b in zip(ours[1], grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
