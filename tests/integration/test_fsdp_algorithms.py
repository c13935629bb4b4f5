"""Every estimator and correction, from raw rewards to stepped weights, against the book.

One model trains on two rollouts of two steps each. On one rank samples come in order, packed two at a
time; on two ranks they come shuffled, in balanced micro-batches of another size: the same must come out.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.config.arguments import Args
from slime.core.types import Sample
from slime.rollout.train_data import samples_to_batch, split_batch
from tests import naive_rl
from tests.args import make_args
from tests.fsdp import whole_weights
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
TIS = {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.8}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"disable_grpo_std_normalization": True, "calculate_per_token_loss": True},
    "dapo": {
        "eps_clip_high": 0.05,
        "calculate_per_token_loss": True,
        "overlong_buffer_len": 6,
        "overlong_penalty_factor": 0.7,
    },
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.003, "eps_clip_high": 0.004},
    "cispo": {"advantage_estimator": "cispo", "eps_clip_high": 0.05},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "kl_coef": 0.2,
        "gamma": 0.9,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
        **KL,
        "kl_loss_type": "k2",
    },
    "dual_clip": {"eps_clip_high": 5.0, "eps_clip_c": 1.01},
    "kl_in_reward": {"kl_coef": 0.2, "kl_loss_type": "k3"},
    "unbiased_kl": {**KL, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "low_var_kl_entropy": {**KL, "kl_loss_type": "low_var_kl", "entropy_coef": 0.02},
    "tis_token": TIS,
    "tis_token_mask": {**TIS, "tis_mode": "mask"},
    "tis_sequence": {**TIS, "tis_level": "sequence"},
    "tis_sequence_mask": {**TIS, "tis_level": "sequence", "tis_mode": "mask"},
    "tis_geometric_mask": {**TIS, "tis_level": "geometric", "tis_mode": "mask", "tis_clip": 1.05},
    "engine_ratio": {"use_rollout_logprobs": True},
    "engine_ratio_gspo": {"use_rollout_logprobs": True, "advantage_estimator": "gspo"},
    "raw_rewards": {"disable_rewards_normalization": True},
    "distilled": {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.5, "rm_url": "http://x"},
    "moving_reference": {**KL, "kl_loss_type": "k2", "ref_update_interval": 1},
    "recomputed_loss": {"recompute_loss_function": True, "entropy_coef": 0.02},
    "padded": {"qkv_format": "bshd"},
    "falling_rate": {"lr_decay_style": "linear", "lr_warmup_iters": 2, "min_lr": 1e-3},
}
NAMES = list(SETTINGS)


def make(model: str, name: str, **more: Any) -> Args:
    common = {
        "hf_checkpoint": model,
        "rollout_max_response_len": naive_rl.MAX_RESPONSE_LEN,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 1,
        "global_batch_size": 4,
        "lr": 3e-3,
        "eps_clip": 0.02,
        "lr_decay_style": "constant",
        "adam_eps": 1e-4,  # so large that rounding of tiny gradients does not show in the update
        "weight_decay": 0.1,
    }
    return make_args(**{**common, **SETTINGS[name], **more})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "qwen3", weight_scale=3.0))


@pytest.fixture(scope="module")
def rollouts(model: str) -> list[list[Sample]]:
    return [naive_rl.make_samples(model, rollout_id) for rollout_id in range(2)]


@pytest.fixture(scope="module")
def naive(model: str, rollouts: list[list[Sample]]) -> dict[str, naive_rl.Learned]:
    return {name: naive_rl.learn(make(model, name), model, rollouts) for name in NAMES}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, model: str, rollouts: list[list[Sample]]) -> dict[str, Any]:
    return run_fsdp_ranks(_train_all, request.param, request.param, model, rollouts)[0]


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradient_norms_are_those_of_the_book(name, trained, naive):
    for number, metrics in enumerate(trained[name]["metrics"]):
        assert metrics["train/loss"] == pytest.approx(
            naive[name].losses[number], rel=2e-4, abs=2e-6
        )
        norm = naive[name].grad_norms[number]
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_weights_after_four_steps_are_those_of_the_book(name, trained, naive):
    for parameter, expected in naive[name].weights.items():
        torch.testing.assert_close(
            trained[name]["weights"][parameter], expected, rtol=1e-4, atol=1e-5
        )


def test_bounds_were_met_and_gaps_are_always_reported(trained):
    for name, result in trained.items():
        assert all(m["train/log_prob_gap_max"] > 0.3 for m in result["metrics"]), name
        assert all("train/mismatch_kl" in m and "train/entropy" in m for m in result["metrics"])
        assert any(m["train/clip_fraction"] > 0 for m in result["metrics"]), name
        if name.startswith("tis"):
            assert all(0 < m["train/tis_clip_fraction"] < 1 for m in result["metrics"]), name


def test_the_settings_differ_from_one_another(naive):
    """A setting that changes nothing would prove nothing; two are meant to change nothing."""
    plain = naive["grpo"].losses
    same = [n for n in NAMES if naive[n].losses == pytest.approx(plain, rel=1e-6)]
    assert same == ["grpo", "padded"]


def _train_all(rank: int, world_size: int, model: str, rollouts: list) -> dict[str, Any]:
    return {name: _train(rank, world_size, model, rollouts, name) for name in NAMES}


def _train(rank: int, world_size: int, model: str, rollouts: list, name: str) -> dict[str, Any]:
    layout = {"micro_batch_size": 2} if world_size == 1 else {"balance_data": True, **_BUDGET}
    args = make(model, name, **layout)
    actor = FSDPTrainRayActor(args, rank, world_size)
    actor.init(args, "actor", with_ref=args.use_kl_loss or args.kl_coef != 0)
    metrics = []
    for rollout_id, samples in enumerate(rollouts):
        ordered = samples if world_size == 1 else _shuffled(args, samples)
        parts = split_batch(args, samples_to_batch(args, ordered), dp_size=world_size, cp_size=1)
        metrics.append(actor.train(rollout_id, parts[rank]).metrics)
    return {"metrics": metrics, "weights": whole_weights(actor)}


_BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 50}


def _shuffled(args: Args, samples: list[Sample]) -> list[Sample]:
    """In any order within each step: which samples form a step is part of the result."""
    steps: dict[int, list[Sample]] = {}
    for sample in samples:
        steps.setdefault(sample.rollout_id % 100 // args.global_batch_size, []).append(sample)
    for step in steps.values():
        random.Random(0).shuffle(step)
    return [sample for step in steps.values() for sample in step]
