"""Any number of ranks and any packing give the gradients and weights of a naive loop over samples."""

from __future__ import annotations

import pytest
import torch

from tests.fsdp import Case, Outcome, train_naively, train_on_ranks
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

NAMES = ["qwen3", "qwen3_two_steps_kl", "llama_checkpointed", "qwen3_moe", "sft_per_token"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")

    def make(family: str, seed: int = 0) -> str:
        path = folder / f"{family}_{seed}"
        return str(
            path
            if path.exists()
            else make_tiny_checkpoint(path, family, seed=seed, weight_scale=3.0)
        )

    budget = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.01}
    return {
        "qwen3": Case(model=make("qwen3"), flags={"micro_batch_size": 2}),
        "qwen3_two_steps_kl": Case(
            model=make("qwen3"), steps=2, flags={**kl, **budget, "rollout_temperature": 0.7}
        ),
        "llama_checkpointed": Case(
            model=make("llama"),
            flags={"micro_batch_size": 3, "gradient_checkpointing": True, "balance_data": True},
        ),
        "qwen3_moe": Case(model=make("qwen3_moe"), flags={**budget, "rollout_temperature": 0.7}),
        "sft_per_token": Case(
            model=make("qwen3"),
            flags={
                "loss_type": "sft_loss",
                "calculate_per_token_loss": True,
                "micro_batch_size": 4,
            },
        ),
    }


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: train_naively(case) for name, case in cases.items()}


@pytest.fixture(scope="module", params=[1, 2, 3])
def trained(request: pytest.FixtureRequest, cases: dict[str, Case]) -> dict[str, Outcome]:
    return run_fsdp_ranks(train_on_ranks, request.param, request.param, cases)[0]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_naive_loop(name, trained, naive):
    ours, theirs = trained[name].grads, naive[name].grads
    assert ours.keys() == theirs.keys()
    for parameter, expected in theirs.items():
        scale = expected.abs().max()
        torch.testing.assert_close(
            ours[parameter] / scale,
            expected / scale,
            rtol=0,
            atol=2e-5,
            msg=lambda m, p=parameter: f"{p}: {m}",
        )


@pytest.mark.parametrize("name", NAMES)
def test_weights_after_training_are_those_of_the_naive_loop(name, trained, naive):
    for parameter, expected in naive[name].weights.items():
        torch.testing.assert_close(trained[name].weights[parameter], expected, rtol=1e-5, atol=2e-6)
