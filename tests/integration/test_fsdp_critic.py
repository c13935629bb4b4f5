"""PPO: actor and critic on any number of ranks learn what a naive loop over samples learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fsdp import Case, whole_weights
from tests.ppo import PpoOutcome, ppo_naively, ppo_on_ranks, start_pair, train_pair
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

NAMES = ["tied", "critic_first"]
PPO = {"advantage_estimator": "ppo", "micro_batch_size": 3}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")
    tied = make_tiny_checkpoint(folder / "qwen3", weight_scale=3.0)
    untied = make_tiny_checkpoint(folder / "llama", "llama", weight_scale=3.0)
    return {
        "tied": Case(model=str(tied), flags={**PPO, "value_clip": 0.05, "critic_lr": 3e-3}),
        "critic_first": Case(
            model=str(untied),
            steps=2,
            flags={
                **PPO,
                "num_critic_only_steps": 1,
                "kl_coef": 0.3,
                "gamma": 0.97,
                "lambd": 0.9,
                "value_clip": 0.01,
                "critic_lr": 3e-3,
                "normalize_advantages": True,
                "balance_data": True,
                "rollout_temperature": 0.7,
            },
        ),
    }


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, PpoOutcome]:
    return {name: ppo_naively(case) for name, case in cases.items()}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, cases: dict[str, Case]) -> dict[str, PpoOutcome]:
    return run_fsdp_ranks(ppo_on_ranks, request.param, request.param, cases)[0]


@pytest.mark.parametrize("name", NAMES)
def test_critic_gradients_are_those_of_the_naive_loop(name, trained, naive):
    ours, theirs = trained[name].critic_grads, naive[name].critic_grads
    assert ours.keys() == theirs.keys()
    for parameter, expected in theirs.items():
        scale = expected.abs().max()
        assert scale > 0, parameter
        torch.testing.assert_close(ours[parameter] / scale, expected / scale, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_weights_after_training_are_those_of_the_naive_loop(name, role, trained, naive):
    ours, theirs = getattr(trained[name], role), getattr(naive[name], role)
    assert ours.keys() == theirs.keys()
    for parameter, expected in theirs.items():
        torch.testing.assert_close(ours[parameter], expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("name", NAMES)
def test_losses_step_by_step_are_those_of_the_naive_loop(name, trained, naive):
    for ours, theirs in zip(trained[name].metrics, naive[name].metrics, strict=True):
        assert ours["train/critic_loss"] == pytest.approx(theirs["critic"], rel=1e-4)
        assert ("actor" in theirs) == ("train/loss" in ours)
        if "actor" in theirs:
            assert ours["train/loss"] == pytest.approx(theirs["actor"], rel=1e-4, abs=1e-6)


def test_value_clipping_was_at_work(trained):
    assert any(m["train/critic_clip_fraction"] > 0 for m in trained["critic_first"].metrics)


@pytest.fixture(scope="module")
def resumed(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_fsdp_ranks(_unbroken_and_resumed, 2, cases["critic_first"], str(folder))[0]


def test_resumed_pair_is_bitwise_the_unbroken_one(resumed):
    assert resumed["resumed"]["metrics"] == resumed["unbroken"]["metrics"]
    for role in ("actor", "critic"):
        for name, weight in resumed["unbroken"][role].items():
            assert torch.equal(resumed["resumed"][role][name], weight), name


def test_critic_may_start_from_a_critic_or_from_an_actor(resumed):
    for name, weight in resumed["saved_critic"].items():
        assert torch.equal(resumed["from_critic"][name], weight), name
    assert not resumed["from_actor"].pop("lm_head.weight").any()
    for name, weight in resumed["from_actor"].items():
        assert torch.equal(weight, resumed["saved_actor"][name]), name


def _unbroken_and_resumed(rank: int, case: Case, folder: str) -> dict[str, Any]:
    args = case.args(num_rollout=4)
    paths = (f"{folder}/actor", f"{folder}/critic")
    for path in paths:
        Path(path).mkdir(exist_ok=True)
    pair = start_pair(args, rank, 2)
    train_pair(pair, range(2))
    for model, path in zip(pair, paths, strict=True):
        model.save_to(path, 1)
    saved = [whole_weights(model) for model in pair]
    result: dict[str, Any] = {"saved_actor": saved[0], "saved_critic": saved[1]}
    for name in ("unbroken", "resumed"):
        if name == "resumed":
            pair = start_pair(args, rank, 2, paths)
        metrics = train_pair(pair, range(2, 4))
        weights = [whole_weights(model) for model in pair]
        result[name] = {"metrics": metrics, "actor": weights[0], "critic": weights[1]}
    for number, name in enumerate(("from_actor", "from_critic")):
        fresh = start_pair(case.args(critic_load=paths[number]), rank, 2)[1]
        result[name] = whole_weights(fresh)
    return result
