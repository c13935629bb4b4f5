"""Estimators, corrections, teacher and moving reference on Megatron, in several layouts, against the book.

What a sequence-level ratio needs of other context ranks, and what a log-prob pass needs of other stages,
is where a layout could change the result.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.arguments import Args
from slime.core.types import Sample
from slime.rollout.train_data import samples_to_batch, split_batch
from tests import naive_rl
from tests.integration.test_distillation import taught
from tests.integration.test_fsdp_algorithms import make
from tests.megatron import CP, PP, SP, whole_weights
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

LAYOUTS = {"TP SP": SP, "PP": PP, "CP": CP}
NAMES = [
    "gspo",
    "cispo",
    "dapo",
    "reinforce_plus_plus",
    "tis_sequence",
    "tis_geometric_mask",
    "moving_reference",
    "recomputed_loss",
    "falling_rate",
    "taught_in_the_trainer",
    "hooked_correction",
    "hooked_reducer",
]
HERE = "tests.parity.test_algorithms"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hooked_correction": (
        "tis_geometric_mask",
        {"custom_tis_function_path": f"{HERE}.geometric_mask"},
    ),
    "hooked_reducer": (
        "dr_grpo",
        {"custom_pg_loss_reducer_function_path": f"{HERE}.sum_over_tokens"},
    ),
}


# ---- hooks that do, with whole samples, what is built in


def geometric_mask(
    *,
    args,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
):
    weights, masks = [], []
    rows = zip(train_log_probs, rollout_log_probs, loss_masks, response_lengths, strict=True)
    for ours, engine, mask, length in rows:
        assert len(ours) == len(engine) == len(mask) == length
        weight = (((ours - engine) * mask).sum() / mask.sum().clamp(min=1)).exp()
        weights.append(weight.expand(length))
        inside = args.tis_clip_low <= weight.item() <= args.tis_clip
        masks.append(mask * inside)
    return pg_loss * torch.cat(weights), masks, {"weight": torch.cat(weights)}


def sum_over_tokens(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert calculate_per_token_loss
    assert [len(mask) for mask in loss_masks] == response_lengths
    return lambda flat: (flat * torch.cat(loss_masks)).sum()


def args_of(model: str, teacher: str, name: str, layout: dict[str, Any]) -> Args:
    flags: dict[str, Any] = {
        "train_backend": "megatron",
        "use_distributed_optimizer": False,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 1,
        "micro_batch_size": 3,
        **layout,
    }
    if name == "taught_in_the_trainer":
        flags |= {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": teacher}
        return make(model, "grpo", **flags)
    base, hook = VARIANTS.get(name, (name, {}))
    return make(model, base, **flags, **hook)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("m")
    made = [make_tiny_checkpoint(folder / str(s), seed=s, weight_scale=3.0) for s in (0, 1)]
    return str(made[0]), str(made[1])


@pytest.fixture(scope="module")
def rollouts(models: tuple[str, str]) -> list[list[Sample]]:
    made = [naive_rl.make_samples(models[0], rollout_id) for rollout_id in range(2)]
    return [[replace(s, teacher_log_probs=None) for s in samples] for samples in made]


@pytest.fixture(scope="module")
def naive(models: tuple[str, str], rollouts: list[list[Sample]]) -> dict[str, naive_rl.Learned]:
    model, teacher = models
    learned = {}
    for name in NAMES:
        args = args_of(model, teacher, name, {})
        samples = [taught(teacher, s) for s in rollouts] if args.use_opd else rollouts
        learned[name] = naive_rl.learn(args, model, samples)
    return learned


@pytest.fixture(scope="module")
def trained(models, rollouts, tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return run_megatron_ranks(_train_all, 2, models, rollouts, folder)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_weights_are_those_of_the_book(name, layout, trained, naive):
    found, expected = trained[layout, name], naive[name]
    for number, metrics in enumerate(found["metrics"]):
        assert metrics["train/loss"] == pytest.approx(expected.losses[number], rel=5e-4, abs=5e-6)
        norm = expected.grad_norms[number]
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=5e-4)
    for parameter, weight in expected.weights.items():
        torch.testing.assert_close(found["weights"][parameter], weight, rtol=1e-4, atol=2e-5)


def test_a_moving_reference_is_part_of_the_checkpoint(trained):
    assert trained["resumed"] == trained["unbroken"]


def _train_all(
    rank: int, models: tuple[str, str], rollouts: list[list[Sample]], folder: str
) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for layout, flags in LAYOUTS.items():
        for name in NAMES:
            actor = _start(args_of(*models, name, flags), rank)
            metrics = [_train(actor, i, samples) for i, samples in enumerate(rollouts)]
            results[layout, name] = {"metrics": metrics, "weights": whole_weights(actor)}
    args = args_of(*models, "moving_reference", PP)
    actor = _start(args, rank)
    _train(actor, 0, rollouts[0])
    Path(folder).mkdir(exist_ok=True)
    actor.save_to(folder, 0)
    results["unbroken"] = _learning(_train(actor, 1, rollouts[1]))
    resumed = _start(args, rank, checkpoint=folder)
    results["resumed"] = _learning(_train(resumed, 1, rollouts[1]))
    return results


def _start(args: Args, rank: int, **options: Any) -> Any:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    actor = MegatronTrainRayActor(args, rank, 2)
    with_ref = args.use_kl_loss or args.kl_coef != 0
    actor.init(args, "actor", with_ref=with_ref, with_opd_teacher=args.use_opd, **options)
    return actor


def _train(actor: Any, rollout_id: int, samples: list[Sample]) -> dict[str, float]:
    here = actor.parallel
    batch = samples_to_batch(actor.args, samples)
    parts = split_batch(actor.args, batch, dp_size=here.dp_size, cp_size=here.cp_size)
    return actor.train(rollout_id, parts[here.dp_rank]).metrics


def _learning(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("train/")}
