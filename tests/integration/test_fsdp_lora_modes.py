"""Adapters on FSDP in other ways of running: offloaded, asleep between rollouts, SFT, distillation, other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.core.types import Sample
from slime.rollout.train_data import samples_to_batch, split_batch
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from tests import naive_rl
from tests.fsdp import Case, first_gradient, make_rows, start_actor, whole_weights
from tests.integration.test_distillation import args_of, taught
from tests.peft_runs import BUDGET, KL, hf_names, peft_case, peft_model, peft_outcome
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

CONFIG = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"}
SETTINGS: dict[str, dict[str, Any]] = {
    "offload": {"fsdp_cpu_offload": True, **KL, **BUDGET},
    "offload_checkpointed": {"fsdp_cpu_offload": True, "gradient_checkpointing": True, **BUDGET},
    "sft": {"loss_type": "sft_loss", **BUDGET},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("m") / "model", weight_scale=3.0))


@pytest.fixture(scope="module")
def in_fp8(model, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    convert_to_fp8(Path(model), folder, Fp8Format(strategy="block", block=(32, 32)))
    return str(folder)


# ---- against peft


@pytest.fixture(scope="module")
def cases(model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: peft_case(model, folder / name, CONFIG, f) for name, f in SETTINGS.items()}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, cases) -> dict[str, Any]:
    return run_fsdp_ranks(_train_all, request.param, request.param, cases)[0]


def _train_all(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _train(rank, world_size, case) for name, case in cases.items()}


def _rows(args: Any, rollout_id: int, rank: int, world_size: int) -> Any:
    return split_batch(args, make_rows(rollout_id), dp_size=world_size, cp_size=1)[rank]


def _train(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    args = case.args()
    actor = start_actor(args, rank, world_size)
    grads = first_gradient(actor, _rows(args, 0, rank, world_size))
    for rollout_id in range(2):
        actor.train(rollout_id, _rows(args, rollout_id, rank, world_size))
    return {"grads": grads, "adapters": _adapters(actor)}


def _adapters(actor: FSDPTrainRayActor) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in whole_weights(actor).items() if ".lora_" in name}


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_and_adapters_are_those_of_peft(name, trained, cases):
    expected = peft_outcome(cases[name])
    assert trained[name]["grads"].keys() == expected.grads.keys()
    for parameter, gradient in expected.grads.items():
        scale = gradient.abs().max()
        found = trained[name]["grads"][parameter]
        torch.testing.assert_close(found / scale, gradient / scale, rtol=0, atol=2e-5)
    for parameter, value in expected.weights.items():
        found = trained[name]["adapters"][parameter]
        torch.testing.assert_close(found, value, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_teacher_in_the_trainer_teaches_adapters_what_it_teaches_those_of_peft(
    ranks, model, tmp_path
):
    """The teacher is another model; the reference for its KL is the student's own log-probs."""
    teacher = str(make_tiny_checkpoint(tmp_path / "teacher", "llama", seed=3, weight_scale=3.0))
    case = peft_case(model, tmp_path / "adapter", CONFIG, {})
    flags = {name: case.flags[name] for name in ("lora_adapter_path", "lora_merge_for_rollout")}
    args = args_of(model, teacher, rollout_temperature=0.8, **flags)
    rollouts = [
        [replace(s, teacher_log_probs=None) for s in naive_rl.make_samples(model, rollout_id)]
        for rollout_id in range(2)
    ]
    peft = peft_model(case, trainable=True)
    known = [taught(teacher, samples, 0.8) for samples in rollouts]
    expected = naive_rl.learn(args, model, known, actor=peft)
    found = run_fsdp_ranks(_distill, ranks, ranks, args, rollouts)[0]
    for number, metrics in enumerate(found["metrics"]):
        assert metrics["train/loss"] == pytest.approx(expected.losses[number], rel=2e-4, abs=2e-6)
        assert metrics["train/grad_norm"] == pytest.approx(expected.grad_norms[number], rel=2e-4)
    assert found["metrics"][0]["train/opd_kl"] != 0
    weights = hf_names(expected.weights)
    assert weights.keys() == found["adapters"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found["adapters"][name], weight, rtol=1e-4, atol=1e-5)


def _distill(rank: int, world_size: int, args: Any, rollouts: list[list[Sample]]) -> dict[str, Any]:
    actor = FSDPTrainRayActor(args, rank, world_size)
    actor.init(args, "actor", with_opd_teacher=True)
    metrics = []
    for rollout_id, samples in enumerate(rollouts):
        parts = split_batch(args, samples_to_batch(args, samples), dp_size=world_size, cp_size=1)
        metrics.append(actor.train(rollout_id, parts[rank]).metrics)
    return {"metrics": metrics, "adapters": _adapters(actor)}


# ---- asleep between rollouts


def _train_in_turns(rank: int, case: Case) -> dict[str, Any]:
    """Return adapters of a trainer that sleeps after each rollout, and of one that stays awake."""
    args = case.args()
    found = []
    for sleeps in (False, True):
        actor = start_actor(args, rank, 2)
        base = actor.model.base_checksum
        for rollout_id in range(3):
            actor.train(rollout_id, _rows(args, rollout_id, rank, 2))
            if sleeps:
                actor.sleep()
                gradients = [p for p in actor.model.params.values() if p.grad is not None]
                actor.wake_up()
        sent = {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket}
        again = replace(actor.model).base_checksum  # not the one that is cached
        found.append((_adapters(actor), sent, again == base))
    return {"awake": found[0], "asleep": found[1], "gradients": len(gradients)}


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "fsdp_cpu_offload"])
@pytest.mark.parametrize("base", ["model", "in_fp8"])
def test_a_trainer_that_sleeps_learns_the_same_bit_for_bit(base, offload, request):
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "fsdp_cpu_offload": offload}
    case = Case(model=request.getfixturevalue(base), flags={**flags, **KL, **BUDGET})
    for found in run_fsdp_ranks(_train_in_turns, 2, case):
        assert found["gradients"] == 0
        for awake, asleep in zip(found["awake"][:2], found["asleep"][:2], strict=True):
            assert awake.keys() == asleep.keys()
            assert all(torch.equal(tensor, asleep[name]) for name, tensor in awake.items())
        assert found["awake"][2] and found["asleep"][2]  # the base is what it was


# ---- resumed on another number of ranks


def _go_on(rank: int, world_size: int, case: Case, path: str, rollouts: list[int]) -> Any:
    """Load the newest checkpoint of the folder, train, save; return adapters and moments."""
    args = case.args()
    newest = max(Path(path).glob("*"), default=None)
    start = None if newest is None else str(newest)
    actor = FSDPTrainRayActor(args, rank, world_size)
    first = actor.init(args, "actor", checkpoint=start)
    for rollout_id in rollouts:
        actor.train(rollout_id, _rows(args, rollout_id, rank, world_size))
    folder = Path(path) / f"{rollouts[-1]}"
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    actor.save_to(str(folder), rollouts[-1])
    moments = {n: t.full_tensor() for n, t in actor.optimizer.state_tensors().items()}
    return {"first": first, **_adapters(actor), **moments, "steps": actor.optimizer.num_steps}


@pytest.mark.parametrize("base", ["model", "in_fp8"])
def test_two_ranks_then_one_then_three_learn_what_one_learns(base, request, tmp_path):
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, **BUDGET, "global_batch_size": 4}
    case = Case(model=request.getfixturevalue(base), steps=2, flags=flags)
    alone = run_fsdp_ranks(_go_on, 1, 1, case, str(tmp_path / "alone"), [0, 1, 2])[0]
    path = str(tmp_path / "moved")
    for rollout_id, ranks in enumerate((2, 1, 3)):
        moved = run_fsdp_ranks(_go_on, ranks, ranks, case, path, [rollout_id])[0]
        assert moved.pop("first") == rollout_id
    assert alone.pop("first") == 0 and alone.pop("steps") == moved.pop("steps") == 6
    assert alone.keys() == moved.keys()
    for name, tensor in alone.items():
        scale = tensor.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(moved[name] / scale, tensor / scale, rtol=0, atol=2e-4, msg=name)
