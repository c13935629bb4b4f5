"""Samples to rows: rewards by group, masks, and a split that loses nothing."""

import numpy as np
import pytest

from slime.ray.train_data import samples_to_batch, split_batch
from slime.utils.errors import UserError
from slime.utils.types import Sample, Status
from tests.args import make_args


def sample(index: int, group: int, reward: float, length: int = 3, **fields) -> Sample:
    defaults = {
        "index": index,
        "group_index": group,
        "reward": reward,
        "tokens": list(range(2 + length)),
        "response_length": length,
        "rollout_log_probs": [-0.5] * length,
        "status": Status.COMPLETED,
    }
    return Sample(**{**defaults, **fields})


def test_rewards_are_normalised_within_uneven_groups():
    rewards = {0: [1.0, 0.0, 0.5], 1: [2.0, 1.0]}
    samples = [sample(10 * g + i, g, r) for g, rs in rewards.items() for i, r in enumerate(rs)]
    batch = samples_to_batch(make_args(), samples)
    expected = [
        (r - np.mean(rs)) / (np.std(rs, ddof=1) + 1e-6) for rs in rewards.values() for r in rs
    ]
    np.testing.assert_allclose(batch.rewards, expected, rtol=1e-5)
    np.testing.assert_array_equal(batch.raw_rewards, [r for rs in rewards.values() for r in rs])


def test_overlong_answers_lose_reward_before_normalisation():
    args = make_args(rollout_max_response_len=8, overlong_buffer_len=4, overlong_penalty_factor=2.0)
    batch = samples_to_batch(args, [sample(0, 0, 1.0, length=3), sample(1, 0, 1.0, length=6)])
    # Tokens 5..8 are punished linearly up to 2: the sixth has covered half of the way.
    np.testing.assert_allclose(batch.raw_rewards, [1.0, 1.0 - 2.0 * 2 / 4])
    assert batch.rewards[0] > 0 > batch.rewards[1]


def test_a_failed_sample_neither_learns_nor_moves_its_siblings():
    healthy = [sample(0, 0, 1.0), sample(1, 0, 0.0)]
    failed = sample(2, 0, 0.0, status=Status.FAILED, remove_sample=True)
    alone = samples_to_batch(make_args(), healthy)
    batch = samples_to_batch(make_args(), [*healthy, failed])
    np.testing.assert_allclose(batch.rewards[:2], alone.rewards)
    assert batch.rewards[2] == 0
    assert batch.loss_masks[2].sum() == 0


def test_removed_samples_keep_their_row_without_weight():
    batch = samples_to_batch(
        make_args(), [sample(0, 0, 1.0, remove_sample=True), sample(1, 0, 0.0)]
    )
    assert [m.tolist() for m in batch.loss_masks] == [[0, 0, 0], [1, 1, 1]]


def test_log_probs_for_some_samples_only_are_refused():
    with pytest.raises(UserError, match="1 of 2 samples have rollout_log_probs"):
        samples_to_batch(
            make_args(), [sample(0, 0, 1.0), sample(1, 0, 0.0, rollout_log_probs=None)]
        )


def test_nothing_to_train_on_is_said():
    empty = sample(0, 0, 1.0, tokens=[1, 2], response_length=0, rollout_log_probs=[])
    with pytest.raises(UserError, match="no sample"):
        samples_to_batch(make_args(), [empty])


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_split_deals_every_row_once_with_total_weight_one(dp_size):
    args = make_args(rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=8)
    samples = [sample(i, i // 2, float(i % 2), length=1 + i) for i in range(8)]
    parts = split_batch(args, samples_to_batch(args, samples), dp_size=dp_size, cp_size=1)
    assert len(parts) == dp_size
    seen, weight = [], 0.0
    for part in parts:
        for step, micro_batches in enumerate(part.schedule.steps):
            for number, rows in enumerate(micro_batches):
                if (step, number) not in part.schedule.fillers:
                    seen += part.sample_indices[rows].tolist()
                    weight += sum(part.loss_weights[row].sum() for row in rows)
    assert sorted(seen) == list(range(8))
    assert weight == pytest.approx(1.0)
