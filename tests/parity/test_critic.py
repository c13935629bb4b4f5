"""PPO on Megatron: actor and critic in several layouts learn what a naive loop over samples learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fsdp import Case
from tests.megatron import CP, PP, SP, megatron_args, my_rows, whole_weights
from tests.ppo import ROLLOUTS, ppo_naively
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

LIMIT = 2e-5  # of the largest entry of each tensor
LAYOUTS: dict[str, dict[str, Any]] = {"TP SP": SP, "PP": PP, "CP": CP}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "m", weight_scale=3.0)
    flags = {
        "advantage_estimator": "ppo",
        "micro_batch_size": 3,
        "value_clip": 0.05,
        "critic_lr": 3e-3,
        "kl_coef": 0.3,
        "gamma": 0.97,
        "lambd": 0.9,
    }
    return Case(model=str(model), flags=flags)


def test_actor_and_critic_follow_the_naive_loop(case: Case):
    expected = ppo_naively(case)
    cases = {name: megatron_args(case, 2, layout) for name, layout in LAYOUTS.items()}
    first, last = run_megatron_ranks(_train_pairs, 2, 2, cases)
    for name in cases:
        _compare(f"{name}: actor", first[name]["actor"], expected.actor)
        body = {n: t for n, t in expected.critic.items() if n != "lm_head.weight"}
        _compare(f"{name}: critic", first[name]["critic"], body)
        # The last pipeline stage has the head.
        head = {"lm_head.weight": expected.critic["lm_head.weight"]}
        _compare(f"{name}: head", last[name]["head"], head)
        losses = [metrics["train/loss"] for metrics in first[name]["metrics"]]
        assert losses == pytest.approx([m["actor"] for m in expected.metrics], rel=1e-3, abs=1e-5)


def _train_pairs(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _train_pair(args, rank, world_size) for name, args in cases.items()}


def _train_pair(args: Any, rank: int, world_size: int) -> dict[str, Any]:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    actor, critic = (MegatronTrainRayActor(args, rank, world_size) for _ in range(2))
    actor.init(args, "actor", with_ref=True)
    critic.init(args, "critic")
    metrics = []
    for rollout_id in range(ROLLOUTS):
        mine = my_rows(actor, rollout_id)
        metrics.append(actor.train(rollout_id, mine, critic.values(mine)).metrics)
        critic.train(rollout_id, my_rows(actor, rollout_id), actor.critic_targets())
    head = getattr(critic.chunks[-1], "output_layer", None)
    return {
        "actor": whole_weights(actor),
        "critic": whole_weights(critic),
        "head": {} if head is None else {"lm_head.weight": head.weight.detach().clone()},
        "metrics": metrics,
    }


def _compare(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max() / tensor.abs().max()
        assert error < LIMIT, f"{what} {name} is off by {error:.1e} of its largest entry"
