"""Numbers about rollouts and evaluations against direct counts."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from slime.core.types import Sample, Status
from slime.rollout.base_types import EvalResult
from slime.rollout.metrics import dropped_metrics, eval_metrics, pass_at_k, rollout_metrics


def sample(reward, length, status=Status.COMPLETED, group=0, prompt=2):
    return Sample(
        reward=reward,
        tokens=[0] * (prompt + length),
        response_length=length,
        status=status,
        group_index=group,
    )


GROUPS = [
    [sample(1.0, 3), sample(0.0, 5, Status.TRUNCATED)],
    [sample(1.0, 4, group=1), sample(1.0, 2, group=1)],
    [sample(0.0, 1, Status.FAILED, group=2), sample(0.5, 6, group=2, prompt=7)],
]


def test_rollout_metrics_leave_failed_samples_out():
    args = SimpleNamespace(reward_key=None, log_passrate=False)
    assert rollout_metrics(args, GROUPS) == {
        "rollout/samples": 6,
        "rollout/failed": 1,
        "rollout/tokens": 3 + 5 + 4 + 2 + 6,
        "rollout/reward_mean": (1 + 0 + 1 + 1 + 0.5) / 5,
        "rollout/response_len_mean": 20 / 5,
        "rollout/response_len_max": 6,
        "rollout/prompt_len_mean": (2 * 4 + 7) / 5,
        "rollout/truncated": 1 / 5,
        "rollout/zero_std_groups": 2,  # the second, and the third with its one reward
    }


def test_pass_rate_on_request_and_reward_key():
    args = SimpleNamespace(reward_key="acc", log_passrate=True)
    groups = [[sample({"acc": 1.0}, 1), sample({"acc": 0.0}, 1)], [sample({"acc": 0}, 1)] * 2]
    metrics = rollout_metrics(args, groups)
    assert metrics["rollout/pass@1"] == 0.25 and metrics["rollout/pass@2"] == 0.5


def test_what_tools_wrote_is_not_generated():
    args = SimpleNamespace(reward_key=None, log_passrate=False)
    agent = sample(1.0, 5)
    agent.loss_mask = [1, 1, 0, 0, 1]
    metrics = rollout_metrics(args, [[agent, sample(1.0, 4)]])
    assert metrics["rollout/tokens"] == 3 + 4 and metrics["rollout/response_len_mean"] == 4.5


def test_components_of_dictionary_rewards():
    """Each is the mean over the samples that have it; texts, NaN and failed samples do not count."""
    args = SimpleNamespace(reward_key="acc", log_passrate=False)
    rewards = [{"acc": 1, "style": 0.5, "why": "long"}, {"acc": 0, "style": np.nan}, {"acc": True}]
    samples = [sample(reward, 1) for reward in rewards]
    failed = sample({"acc": 9.0}, 1, Status.FAILED)
    metrics = rollout_metrics(args, [[*samples, failed]])
    assert metrics["rollout/reward/acc"] == metrics["rollout/reward_mean"] == 2 / 3
    assert metrics["rollout/reward/style"] == 0.5 and "rollout/reward/why" not in metrics
    result = EvalResult(rewards=[1, 0, 1], truncated=[False] * 3, samples=samples)
    evaluated = eval_metrics({"x": result})
    assert evaluated["eval/x/reward/acc"] == 2 / 3 and evaluated["eval/x/reward/style"] == 0.5


def test_the_number_of_logged_components_is_bounded():
    args = SimpleNamespace(reward_key="0", log_passrate=False)
    samples = [sample({str(n): 1.0 for n in range(m, m + 100)}, 1) for m in (0, 50)]
    samples[1].reward["0"] = 1.0
    metrics = rollout_metrics(args, [samples])
    assert len([name for name in metrics if "/reward/" in name]) == 64


def test_all_failed():
    args = SimpleNamespace(reward_key=None, log_passrate=True)
    metrics = rollout_metrics(args, [[sample(0.0, 1, Status.FAILED)]])
    assert metrics == {"rollout/samples": 1, "rollout/failed": 1, "rollout/tokens": 0}


@pytest.mark.parametrize("total", [1, 3, 6])
def test_pass_at_k_counts_every_subset(total):
    for correct in range(total + 1):
        rewards = np.array([1] * correct + [0] * (total - correct))
        for k in range(1, total + 1):
            best = [rewards[list(pick)].max() for pick in combinations(range(total), k)]
            assert pass_at_k(total, correct, k) == pytest.approx(np.mean(best))


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert 0 < pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def test_eval_metrics_without_samples():
    data = {"a": EvalResult(rewards=[1.0, 0.0], truncated=[True, False])}
    assert eval_metrics(data) == {"eval/a/reward": 0.5, "eval/a/truncated": 0.5}


def test_dropped_reasons():
    assert dropped_metrics({"zero_std_0": 3}) == {"rollout/dropped_zero_std_0": 3.0}
