import numpy as np
import pytest
import torch

from slime.algorithms.estimators import (
    RECIPES,
    compute_advantages,
    gae,
    normalize_group_rewards,
    overlong_penalty,
)
from slime.config.flags.registry import own_flags
from tests.batches import random_batch

ESTIMATORS = [
    "grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]


def test_every_estimator_can_be_chosen():
    assert sorted(RECIPES) == sorted(own_flags()["advantage_estimator"].choices)


def naive_group_rewards(rewards, groups, estimator, std):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        same_group = torch.tensor([r for r, g in zip(rewards, groups, strict=True) if g == group])
        if estimator in ("reinforce_plus_plus", "ppo"):
            result.append(reward)
        elif len(same_group) == 1:
            result.append(0.0)
        elif estimator == "rloo":
            result.append(reward - (same_group.sum().item() - reward) / (len(same_group) - 1))
        else:
            value = reward - same_group.mean().item()
            if std and estimator in ("grpo", "gspo", "cispo"):
                value /= same_group.std().item() + 1e-6
            result.append(value)
    return result


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("estimator", [*ESTIMATORS, "ppo"])
def test_group_rewards_for_groups_of_any_size_in_any_order(estimator, std):
    rng = np.random.default_rng(0)
    groups = rng.permutation([4] * 5 + [900] * 2 + [7] + [1] * 3)
    rewards = rng.normal(size=len(groups))
    got = normalize_group_rewards(rewards, groups, estimator=estimator, std=std)
    assert got.dtype == np.float32
    expected = naive_group_rewards(rewards.tolist(), groups.tolist(), estimator, std)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_a_group_of_equal_rewards_teaches_nothing():
    for estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        got = normalize_group_rewards(np.ones(4), np.zeros(4), estimator=estimator, std=True)
        assert got.tolist() == [0, 0, 0, 0]


def test_one_right_of_two():
    got = normalize_group_rewards(np.array([1, 0]), np.array([3, 3]), estimator="grpo", std=True)
    half = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(got, [half, -half], rtol=1e-6)


def test_nearly_equal_rewards_are_divided_by_their_small_deviation():
    """1e-6 is added to the deviation itself; under the root it would halve such advantages."""
    got = normalize_group_rewards(np.array([2e-4, 0]), np.zeros(2), estimator="grpo", std=True)
    np.testing.assert_allclose(got[0], 1e-4 / (np.sqrt(2) * 1e-4 + 1e-6), rtol=1e-5)


def test_overlong_penalty_falls_linearly_in_the_buffer():
    lens = np.array([10, 80, 85, 90, 100, 120])
    got = overlong_penalty(lens, max_response_len=100, buffer_len=20, factor=0.5)
    np.testing.assert_allclose(got, [0, 0, -0.125, -0.25, -0.5, -0.5])


KL = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


def naive_returns(batch, row, kl_coef, gamma, kl_type):
    """Return of each trained token by a double loop over what comes after it."""
    trained = [t for t, m in enumerate(batch.loss_masks[row]) if m]
    gaps = batch.old_log_probs[row].astype(float) - batch.ref_log_probs[row]
    earned = [-kl_coef * float(KL[kl_type](gaps[t])) for t in trained]
    if trained:
        earned[-1] += float(batch.rewards[row])
    returns = np.zeros(int(batch.response_lens[row]))
    for i, t in enumerate(trained):
        returns[t] = sum(gamma ** (j - i) * earned[j] for j in range(i, len(trained)))
    return returns


@pytest.mark.parametrize(
    ("kl_coef", "kl_type"), [(0.0, "k1"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")]
)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_returns_and_advantages_equal_the_double_loop(estimator, kl_coef, kl_type):
    batch = random_batch(6, seed=2)
    batch.loss_masks[4][:] = 0
    compute_advantages(batch, estimator=estimator, kl_coef=kl_coef, kl_type=kl_type, gamma=0.9)
    gamma = 0.9 if estimator == "reinforce_plus_plus" else 1.0
    for row in range(6):
        expected = naive_returns(batch, row, kl_coef, gamma, kl_type)
        np.testing.assert_allclose(batch.advantages[row], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(batch.returns[row], batch.advantages[row])
    batch.check()


def test_without_kl_every_trained_token_has_the_reward():
    batch = random_batch(4)
    compute_advantages(batch, estimator="grpo")
    for row in range(4):
        np.testing.assert_array_equal(
            batch.advantages[row], batch.rewards[row] * batch.loss_masks[row]
        )


def test_a_kl_penalty_without_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        compute_advantages(random_batch(2, ref_log_probs=None), estimator="grpo", kl_coef=0.1)


def naive_gae(rewards, values, gamma, lambd):
    """A_t as the exponentially weighted mean of the k-step estimates, summed term by term."""
    count = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(count)]
    return [
        sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)
    ]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.95), (0.9, 0.0)])
def test_gae_equals_its_sum(gamma, lambd):
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=n) for n in (5, 1, 9, 0)]
    values = [rng.normal(size=n) for n in (5, 1, 9, 0)]
    advantages, returns = gae(rewards, values, gamma=gamma, lambd=lambd)
    for r, v, a, ret in zip(rewards, values, advantages, returns, strict=True):
        expected = naive_gae(r.tolist(), v.tolist(), gamma, lambd)
        np.testing.assert_allclose(a, expected)
        np.testing.assert_allclose(ret, np.array(expected) + v)


def test_gae_without_discount_is_return_minus_value():
    advantages, returns = gae(
        [np.array([1.0, 2.0, 4.0])], [np.array([0.5, 0.1, -1.0])], gamma=1.0, lambd=1.0
    )
    np.testing.assert_allclose(advantages[0], [7 - 0.5, 6 - 0.1, 4 + 1.0])
    np.testing.assert_allclose(returns[0], [7, 6, 4])


def test_ppo_passes_over_tokens_that_are_not_trained():
    rng = np.random.default_rng(0)
    batch = random_batch(5, seed=3)
    batch.values = [rng.normal(size=n).astype(np.float32) for n in batch.response_lens]
    compute_advantages(batch, estimator="ppo", gamma=0.9, lambd=0.8)
    for row in range(5):
        trained = np.flatnonzero(batch.loss_masks[row])
        rewards = np.zeros(len(trained))
        rewards[-1:] = batch.rewards[row]
        expected = naive_gae(rewards.tolist(), batch.values[row][trained].tolist(), 0.9, 0.8)
        np.testing.assert_allclose(batch.advantages[row][trained], expected, rtol=1e-5)
        assert not batch.advantages[row][batch.loss_masks[row] == 0].any()


def trained_tokens(batch, column):
    return np.concatenate([c[m > 0] for c, m in zip(column, batch.loss_masks, strict=True)])


def test_normalisation_is_over_trained_tokens():
    batch = random_batch(8, seed=5)
    compute_advantages(batch, estimator="reinforce_plus_plus", normalize=True, kl_coef=0.1)
    values = trained_tokens(batch, batch.advantages).astype(np.float64)
    assert abs(values.mean()) < 1e-6 and abs(values.std() - 1) < 1e-5
    returns = trained_tokens(batch, batch.returns).astype(np.float64)
    np.testing.assert_allclose(values, (returns - returns.mean()) / returns.std(), atol=1e-5)


def test_normalisation_leaves_the_returns_for_the_critic_as_they_are():
    rng = np.random.default_rng(0)
    plain = random_batch(6, seed=5)
    plain.values = [rng.normal(size=n).astype(np.float32) for n in plain.response_lens]
    normalised = plain.select(list(range(6)))
    compute_advantages(plain, estimator="ppo")
    compute_advantages(normalised, estimator="ppo", normalize=True)
    for a, b in zip(plain.returns, normalised.returns, strict=True):
        np.testing.assert_array_equal(a, b)
    before, after = (trained_tokens(b, b.advantages).astype(float) for b in (plain, normalised))
    np.testing.assert_allclose(after, (before - before.mean()) / before.std(), atol=1e-5)
