"""Rows at the edges: uneven groups, equal rewards, empty and prompt-less responses, the length limit.

Each expected number is worked out here by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime.algorithms.estimators import RECIPES, compute_advantages
from slime.algorithms.policy_loss import policy_loss
from slime.backends.reporting import Reporter
from slime.core.packing import pack
from slime.core.types import Activity, LossInputs, ParallelInfo, Sample, Status
from slime.rollout.train_data import samples_to_batch, split_batch
from tests.args import make_args

ROOT = math.sqrt(1 / 3)  # deviation of 1, 0, 0 over G-1: ((2/3)^2 + 2 (1/3)^2) / 2 = 1/3


def sample(index: int, group: int, reward: float, length: int = 2, **fields) -> Sample:
    values = {
        "index": index,
        "group_index": group,
        "reward": reward,
        "tokens": [7, *range(10, 10 + length)],
        "response_length": length,
        "rollout_log_probs": [-0.5] * length,
        "status": Status.COMPLETED,
    }
    return Sample(**{**values, **fields})


def advantages_and_loss(samples: list[Sample], **flags) -> tuple[list[list[float]], float, bool]:
    """Advantages of each row; loss and whether there is a gradient, of a policy at log-probs -1."""
    args = make_args(rollout_batch_size=len(samples), n_samples_per_prompt=1, **flags)
    (part,) = split_batch(args, samples_to_batch(args, samples), dp_size=1, cp_size=1)
    part.values = [np.zeros(n, np.float32) for n in part.response_lens]
    compute_advantages(part, estimator=args.advantage_estimator)
    packed = pack(part, list(range(len(part))), ParallelInfo())
    log_probs = torch.full_like(packed.loss_mask, -1.0).requires_grad_()
    output = policy_loss(
        LossInputs(
            log_probs=log_probs,
            loss_mask=packed.loss_mask,
            loss_weights=packed.loss_weights,
            cu_seqlens=packed.cu_seqlens,
            advantages=packed.advantages,
        ),
        estimator=args.advantage_estimator,
    )
    output.loss.backward()
    rows = [row.tolist() for row in part.advantages]
    return rows, output.loss.item(), bool(log_probs.grad.any())


def test_a_rank_without_rows_reports_no_tokens():
    """It repeats the shortest row in its dummies, which another rank trains on and reports."""
    args = make_args(rollout_batch_size=2, n_samples_per_prompt=1)
    batch = samples_to_batch(args, [sample(0, 0, 1.0, 5), sample(1, 1, 0.0, 3)])
    batch.logged = np.ones(2, np.int8)
    reports = []
    for part in split_batch(args, batch, dp_size=3, cp_size=1):
        part.advantages = [np.zeros(n, np.float32) for n in part.response_lens]
        reports.append(Reporter(args, "actor", ParallelInfo()).report(part, [], {}, Activity()))
    assert [[row.sample_index for row in report.tokens] for report in reports] == [[0], [1], []]
    assert [report.metrics["perf/train_tokens"] for report in reports] == [6, 4, 0]


UNEVEN = [(0, 1.0), (0, 0.0), (0, 0.0), (1, 1.0), (2, 1.0), (2, 0.0)]
HALF = 0.5 / (math.sqrt(0.5) + 1e-6)
EXPECTED = {
    "grpo": [2 / 3 / (ROOT + 1e-6), *[-1 / 3 / (ROOT + 1e-6)] * 2, 0.0, HALF, -HALF],
    "rloo": [1.0, -0.5, -0.5, 0.0, 1.0, -1.0],  # 1 - 0; 0 - (1 + 0) / 2; nothing; 1 - 0; 0 - 1
    "reinforce_plus_plus_baseline": [2 / 3, -1 / 3, -1 / 3, 0.0, 0.5, -0.5],
    "reinforce_plus_plus": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
    "ppo": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],  # against values of 0, undiscounted
}


@pytest.mark.parametrize("estimator", EXPECTED)
def test_uneven_groups(estimator):
    samples = [sample(i, group, reward) for i, (group, reward) in enumerate(UNEVEN)]
    rows, loss, _ = advantages_and_loss(samples, advantage_estimator=estimator)
    expected = EXPECTED[estimator]
    np.testing.assert_allclose(rows, [[a, a] for a in expected], rtol=1e-5, atol=1e-7)
    # On policy the ratio is 1: the loss is minus the mean advantage.
    assert loss == pytest.approx(-sum(expected) / 6, abs=1e-6)


@pytest.mark.parametrize("estimator", sorted(RECIPES))
def test_equal_rewards(estimator):
    """No sample is better than its group, so there is no gradient; without a group baseline there is."""
    rows, loss, learns = advantages_and_loss(
        [sample(i, 0, 0.7) for i in range(4)], advantage_estimator=estimator
    )
    alone = estimator in ("reinforce_plus_plus", "ppo")
    assert rows == [[pytest.approx(0.7 if alone else 0.0)] * 2] * 4
    assert loss == pytest.approx(-0.7 if alone else 0.0) and learns == alone


def test_an_empty_response_counts_in_its_group_and_among_the_executions():
    """Rewards 1, 0, 0 of which one 0 is that of no tokens at all: the baseline is still 1/3."""
    empty = sample(2, 0, 0.0, length=0, tokens=[7, 8])
    samples = [sample(0, 0, 1.0), sample(1, 0, 0.0), empty]
    rows, loss, _ = advantages_and_loss(samples, disable_grpo_std_normalization=True)
    expected = [[2 / 3, 2 / 3], [-1 / 3, -1 / 3], [0.0]]
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(values, abs=1e-6)
    assert loss == pytest.approx(-(2 / 3 - 1 / 3) / 3, abs=1e-6)  # three executions, one silent


def test_an_empty_response_without_any_token():
    batch = samples_to_batch(
        make_args(), [sample(0, 0, 1.0), sample(1, 0, 0.0, length=0, tokens=[])]
    )
    assert batch.loss_masks[1].tolist() == [0] and batch.rollout_log_probs[1].tolist() == [0.0]


def test_a_response_without_a_prompt_gives_its_first_token_away():
    """The first of three tokens is predicted by nothing: two remain to be trained on."""
    whole = sample(0, 0, 1.0, tokens=[4, 5, 6], response_length=3)
    whole.rollout_log_probs, whole.loss_mask = [-0.1, -0.2, -0.3], [1, 0, 1]
    batch = samples_to_batch(make_args(), [whole, sample(1, 0, 0.0)])
    assert batch.tokens[0].tolist() == [4, 5, 6] and batch.response_lens[0] == 2
    assert batch.loss_masks[0].tolist() == [0, 1]
    np.testing.assert_allclose(batch.rollout_log_probs[0], [-0.2, -0.3])
    single = sample(0, 0, 1.0, tokens=[4], response_length=1, rollout_log_probs=[-0.1])
    batch = samples_to_batch(make_args(), [single, sample(1, 0, 0.0)])
    assert (batch.tokens[0].tolist(), batch.loss_masks[0].tolist()) == ([4, 4], [0])


def test_a_response_cut_at_the_limit_is_trained_on_and_pays_the_whole_penalty():
    """Limit 8, buffer 4: 8 tokens cost the factor 0.5, 4 tokens nothing; then 0.5 and 1 are compared."""
    samples = [
        sample(0, 0, 1.0, length=8, status=Status.TRUNCATED),
        sample(1, 0, 1.0, length=4),
    ]
    args = make_args(overlong_buffer_len=4, overlong_penalty_factor=0.5)
    batch = samples_to_batch(args, samples)
    assert batch.raw_rewards.tolist() == [0.5, 1.0] and batch.truncated.tolist() == [1, 0]
    assert [mask.sum() for mask in batch.loss_masks] == [8, 4]
    deviation = math.sqrt(2 * 0.25**2)
    np.testing.assert_allclose(
        batch.rewards, np.array([-0.25, 0.25]) / (deviation + 1e-6), rtol=1e-5
    )


def test_a_context_filled_to_the_last_token_is_an_ordinary_row():
    """Prompt and response together are as long as the context: the last token predicts nothing."""
    full = sample(0, 0, 1.0, length=7, status=Status.TRUNCATED)
    rows, loss, _ = advantages_and_loss(
        [full, sample(1, 0, 0.0)], rollout_max_context_len=8, advantage_estimator="rloo"
    )
    assert rows == [[1.0] * 7, [-1.0] * 2]
    assert loss == pytest.approx(0.0, abs=1e-6)  # each execution is a mean over its own tokens


def test_failed_samples_need_no_teacher():
    failed = sample(1, 0, 0.0, status=Status.FAILED, remove_sample=True)
    taught = sample(0, 0, 1.0, teacher_log_probs=[-0.1, -0.2])
    batch = samples_to_batch(make_args(), [taught, failed])
    assert batch.teacher_log_probs[1].tolist() == [0.0, 0.0]
