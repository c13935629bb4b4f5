"""Muon and SGD of the FSDP trainer: against plain loops on whole matrices, and across a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from slime.backends.fsdp_utils.meta_model import count_rank
from slime.core.errors import UserError
from slime.rollout.train_data import split_batch
from tests.fsdp import Case, make_rows, start_actor, whole_weights
from tests.naive_optimizers import SIMPLE, NaiveMuon, newton_schulz, relative_error
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

DECAY, CLIP, LR, STEPS = 0.1, 20.0, 1e-3, 4
MUON = {
    "optimizer": "muon",
    "lr": LR,
    "weight_decay": DECAY,
    "clip_grad": CLIP,
    "adam_eps": 1e-8,
    "lr_decay_style": "linear",
    "lr_decay_iters": 8,
    "muon_extra_scale_factor": 0.2,
}
VARIANTS = {
    "default": {},
    "nesterov": {"muon_use_nesterov": True, "muon_momentum": 0.8},
    "shape": {"muon_scale_mode": "shape_scaling", "muon_num_ns_steps": 3},
    "unclipped": {"clip_grad": 0.0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    dense = make_tiny_checkpoint(folder / "dense", num_attention_heads=3, num_key_value_heads=1)
    experts = make_tiny_checkpoint(folder / "experts", "qwen3_moe")
    return {"dense": str(dense), "experts": str(experts)}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, str]) -> dict[str, Any]:
    return run_fsdp_ranks(_step_all, 1, models, 1)[0]


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, str]) -> dict[str, Any]:
    return run_fsdp_ranks(_step_all, 2, models, 2)[0]


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_muon_is_the_plain_loop_on_whole_matrices(one_rank, model, variant):
    found = one_rank[model, variant]
    wanted = _naively(found["start"], VARIANTS[variant])
    for name, weight in found["weights"].items():
        # The iterations are in bf16, which moves singular values near 1 by some percent.
        tolerance = 0.05 if _is_matrix(name) else 1e-4
        error = relative_error(weight, wanted[name], found["start"][name])
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_number_of_ranks_changes_nothing(one_rank, two_ranks, model, variant):
    found, wanted = two_ranks[model, variant], one_rank[model, variant]
    for name, weight in found["weights"].items():
        if variant == "unclipped":
            assert torch.equal(weight, wanted["weights"][name]), name
        # The norm is summed in another order, and bf16 makes steps of its last bits.
        error = relative_error(weight, wanted["weights"][name], found["start"][name])
        assert error < 0.02, (name, error)


def test_muon_is_torch_optim_muon(one_rank):
    """Whose match_rms_adamw is the spectral scale times 0.2."""
    found = one_rank["dense", "nesterov"]
    start = {name: weight for name, weight in found["start"].items() if _is_matrix(name)}
    params = {name: torch.nn.Parameter(weight.clone()) for name, weight in start.items()}
    muon = torch.optim.Muon(
        params.values(), weight_decay=DECAY, momentum=0.8, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        grads = _grads(found["start"], step)
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        for name, param in params.items():
            param.grad = grads[name] * min(1.0, CLIP / (float(norm) + 1e-6))
        muon.param_groups[0]["lr"] = _lr(step)
        muon.step()
    for name, param in params.items():
        error = relative_error(found["weights"][name], param.detach(), start[name])
        assert error < 0.02, (name, error)  # torch divides by a norm rounded to bf16


@pytest.mark.parametrize("world_size", [1, 2])
def test_sgd_is_the_plain_loop(one_rank, two_ranks, world_size):
    found = (one_rank if world_size == 1 else two_ranks)["sgd"]
    start = found["start"]
    weights = {name: weight.double() for name, weight in start.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(STEPS):
        grads = _grads(start, step)
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        for name, weight in weights.items():
            decay = DECAY if weight.ndim > 1 else 0.0
            grad = grads[name].double() * min(1.0, CLIP / (norm + 1e-6)) + decay * weight
            momenta[name] = 0.7 * momenta[name] + grad
            weights[name] = weight - _lr(step) * momenta[name]
    for name, weight in found["weights"].items():
        assert relative_error(weight, weights[name], start[name]) < 1e-3, name


@pytest.mark.parametrize("kind", ["muon", "sgd"])
def test_a_resumed_run_is_bitwise_the_unbroken_one(two_ranks, kind):
    unbroken, resumed = two_ranks["unbroken", kind], two_ranks["resumed", kind]
    assert resumed["metrics"] == unbroken["metrics"]
    for name, weight in unbroken["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
    assert "muon" not in kind or "--optimizer muon, this run has adam" in two_ranks["refused"]


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_plan_knows_the_bytes_of_the_state(models, two_ranks, model):
    for kind, found in (("muon", two_ranks[model, "default"]), ("sgd", two_ranks["sgd"])):
        if kind == "muon" or model == "dense":
            args = Case(model=models[model], flags={"optimizer": kind}).args()
            assert count_rank(args, 0, 2).moment_bytes == found["held"]


def _step_all(rank: int, models: dict[str, str], world_size: int) -> dict[str, Any]:
    results: dict[Any, Any] = {
        (model, variant): _step(rank, world_size, path, {**MUON, **flags})
        for model, path in models.items()
        for variant, flags in VARIANTS.items()
    }
    sgd = {**MUON, "optimizer": "sgd", "sgd_momentum": 0.7, "muon_extra_scale_factor": None}
    results["sgd"] = _step(rank, world_size, models["dense"], sgd)
    if world_size == 2:
        results |= _resumed(rank, models["dense"])
    return results


def _step(rank: int, world_size: int, path: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Given gradients, the same for any number of ranks."""
    actor = start_actor(Case(model=path, flags=flags).args(), rank, world_size)
    start = whole_weights(actor)
    for step in range(STEPS):
        grads = _grads(start, step)
        for name, param in actor.model.params.items():
            param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements)
        actor.optimizer.step()
    params = sum(param.to_local().nbytes for param in actor.model.params.values())
    held = sum(tensor.nbytes for tensor in actor.optimizer.storages()) - params
    return {"start": start, "weights": whole_weights(actor), "held": held}


def _resumed(rank: int, path: str) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for kind in ("muon", "sgd"):
        args = Case(model=path, flags={"optimizer": kind}).args(num_rollout=4)
        actor = start_actor(args, rank, 2)
        _train(actor, range(2), rank)
        folder = Path(path).parent / f"saved-{kind}"
        folder.mkdir(exist_ok=True)
        actor.save_to(str(folder), 1, force_sync=True)
        metrics = _train(actor, range(2, 4), rank)
        results["unbroken", kind] = {"metrics": metrics, "weights": whole_weights(actor)}
        resumed = start_actor(args, rank, 2, checkpoint=str(folder))
        metrics = _train(resumed, range(2, 4), rank)
        results["resumed", kind] = {"metrics": metrics, "weights": whole_weights(resumed)}
    try:
        start_actor(Case(model=path).args(), rank, 2, checkpoint=str(folder.parent / "saved-muon"))
    except UserError as error:
        results["refused"] = str(error)
    return results


def _train(actor: Any, rollout_ids: range, rank: int) -> list[dict[str, float]]:
    metrics = []
    for rollout_id in rollout_ids:
        parts = split_batch(actor.args, make_rows(rollout_id), dp_size=2, cp_size=1)
        report = actor.train(rollout_id, parts[rank]).metrics
        metrics.append({k: v for k, v in report.items() if not k.startswith("perf/")})
    return metrics


def _naively(start: dict[str, torch.Tensor], flags: dict[str, Any]) -> dict[str, torch.Tensor]:
    steps = flags.get("muon_num_ns_steps", 5)
    spectral = flags.get("muon_scale_mode", "spectral") == "spectral"

    def orthogonal(name: str, momentum: torch.Tensor) -> torch.Tensor:
        if momentum.ndim == 3:
            return torch.stack([orthogonal(name, expert) for expert in momentum])
        rows, columns = momentum.shape
        scale = max(rows, columns) ** 0.5 if spectral else max(1.0, rows / columns) ** 0.5
        return 0.2 * scale * newton_schulz(momentum, steps, SIMPLE)

    naive = NaiveMuon(
        matrix=_is_matrix,
        orthogonal=orthogonal,
        decay=DECAY,
        beta=flags.get("muon_momentum", 0.95),
        nesterov=flags.get("muon_use_nesterov", False),
    )
    weights = dict(start)
    for step in range(STEPS):
        naive.step(
            weights, _grads(start, step), _lr(step), flags.get("clip_grad", CLIP) or math.inf
        )
    return weights


def _is_matrix(name: str) -> bool:
    return "embed_tokens" not in name and "lm_head" not in name and "norm" not in name


def _lr(step: int) -> float:
    return LR * (1 - step / 8)


def _grads(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Of full rank, with singular values that differ; large enough to be clipped."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(w.shape, generator=generator) for name, w in weights.items()}
