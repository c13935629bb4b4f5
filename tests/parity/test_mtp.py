"""Multi-token-prediction layers: loss and gradients as a naive loop's, and a policy that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.config.arguments import Args
from tests.fsdp import Case, make_rows
from tests.megatron import (
    CP,
    EP,
    ETP1,
    FULL_RECOMPUTE,
    OVERLAP,
    PADDED,
    PP,
    SP,
    VPP,
    megatron_args,
    my_rows,
    start_actor,
)
from tests.parity.mtp_models import MODELS, NaiveMtp, make_mtp_model
from tests.rank_pool import run_megatron_ranks

FACTOR = 0.5
TOLERANCE = 1e-4  # of the largest gradient of a tensor
Layouts = dict[str, tuple[dict[str, Any], ...]]
ONE: Layouts = {"one process": (), "recompute": (FULL_RECOMPUTE,), "padded": (PADDED,)}
TWO: Layouts = {"DP2": (), "TP2": (SP,), "PP2": (PP,), "CP2": (CP,), "PP2 VPP2": (VPP,)}
EXPERTS: Layouts = {"EP2": (EP, ETP1), "TP2 EP2": (SP, EP, ETP1)}


def layouts_of(name: str) -> dict[str, tuple[int, tuple[dict[str, Any], ...]]]:
    """Number of processes and flags, by name."""
    two = TWO if name == "mimo" else TWO | EXPERTS
    found = {key: (1, flags) for key, flags in ONE.items()} | {
        key: (2, flags) for key, flags in two.items()
    }
    return {"one process": found["one process"]} if name == "mimo with two" else found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return {name: make_mtp_model(folder / name.replace(" ", "_"), name) for name in MODELS}


def case_of(folder: Path, name: str) -> Case:
    return Case(model=str(folder), flags={"micro_batch_size": 3, "clip_grad": 0.05})


def with_mtp(name: str) -> dict[str, Any]:
    return {
        "mtp_num_layers": MODELS[name][1],
        "enable_mtp_training": True,
        "mtp_loss_scaling_factor": FACTOR,
    }


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_naive_loops(models: dict[str, Path], name: str):
    naive = NaiveMtp(models[name], name)
    loss = naive.loss(make_rows(0))
    (FACTOR * loss).backward()
    expected = naive.gradients()
    for size in (1, 2):
        args = {
            key: megatron_args(case_of(models[name], name), size, *flags, **with_mtp(name))
            for key, (count, flags) in layouts_of(name).items()
            if count == size
        }
        if not args:
            continue
        plain = {
            key: one.replace(enable_mtp_training=False, mtp_num_layers=None)
            for key, one in args.items()
        }
        outcome = run_megatron_ranks(gradients, size, args, plain)[0]
        for key, found in outcome.items():
            where = f"{name}, {key}"
            assert found["loss"] == pytest.approx(float(loss), rel=1e-5), where
            assert set(expected) <= set(found["with"]), where
            for tensor, grad in expected.items():
                gap = (found["with"][tensor] - grad).abs().max() / grad.abs().max()
                assert gap < TOLERANCE, f"{where}, {tensor}: {gap}"
            for tensor, grad in found["without"].items():
                gap = (found["with"][tensor] - grad).abs().max()
                assert gap <= 1e-6 * grad.abs().max(), f"{where}: the policy's {tensor} moved {gap}"


def gradients(rank: int, args: dict[str, Args], plain: dict[str, Args]) -> dict[str, Any]:
    return {key: _gradients(rank, args[key], plain[key]) for key in args}


def _gradients(rank: int, args: Args, plain: Args) -> dict[str, Any]:
    without, _ = _first_gradient(rank, plain)
    found, metrics = _first_gradient(rank, args)
    return {"with": found, "without": without, "loss": metrics}


def _first_gradient(rank: int, args: Args) -> tuple[dict[str, torch.Tensor], float]:
    from slime.backends.megatron_utils.hf_weights.export import export_hf

    actor = start_actor(args, rank, args.actor_num_gpus_per_node)
    batch = my_rows(actor, 0)
    actor.advantages(0, batch)
    result = actor.forward_backward(next(actor.steps(batch)))
    for chunk in actor.chunks:
        for param in chunk.parameters():
            param.data.copy_(param.main_grad)
    here = actor.parallel
    speaks = here.tp_rank == 0 and here.pp_rank == here.pp_size - 1
    total = result.metrics["mtp_loss"].total if speaks and args.enable_mtp_training else 0.0
    sums = torch.tensor(total)
    if here.world_size > 1:
        torch.distributed.all_reduce(sums)
    grads = {name: t.clone() for name, t in export_hf(actor.chunks, actor._weights)}
    return grads, float(sums) / max(args.mtp_num_layers or 1, 1)


TRAINED: Layouts = {
    "DP2, overlapped": (OVERLAP,),
    "PP2, overlapped": (PP, OVERLAP),
    "PP2, muon": (PP, {"optimizer": "muon"}),
    "TP2, asleep in between": (SP, {"colocate": True, "rollout_num_gpus": None}),
}


def test_the_policy_trains_as_without_and_every_mtp_weight_moves(models: dict[str, Path]):
    """The gradient is clipped in every step, by a norm in which MTP layers do not count."""
    args = {
        key: megatron_args(
            case_of(models["glm4_moe"], "glm4_moe"), 2, *flags, **with_mtp("glm4_moe")
        )
        for key, flags in TRAINED.items()
    }
    plain = {key: one.replace(enable_mtp_training=False) for key, one in args.items()}
    first = load_file(models["glm4_moe"] / "model.safetensors")
    for key, found in run_megatron_ranks(train_both, 2, args, plain)[0].items():
        for tensor, weight in found["without"].items():
            # The norm is summed over other shards: its last bit depends on the processor's kernels.
            far = (found["with"][tensor] - weight).abs().max()
            assert far <= 1e-6 * weight.abs().max(), f"{key}: {tensor} {far}"
        trained = set(found["with"]) - set(found["without"])
        still = {n for n in trained if torch.equal(found["with"][n], first[n])}
        assert trained and still <= {n for n in trained if "e_score_correction_bias" in n}, key
        assert found["losses"][1] < found["losses"][0], key
        assert found["copy"] == 0.0, f"{key}: the last stage's embedding is not the first's"
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6), key
        assert min(found["norms"][0]) > 0.05, key


def train_both(rank: int, args: dict[str, Args], plain: dict[str, Args]) -> dict[str, Any]:
    outcome = {}
    for key in args:
        without = _trained(rank, plain[key])
        found = _trained(rank, args[key])
        outcome[key] = {
            "without": without["weights"],
            "with": found["weights"],
            "losses": found["losses"],
            "copy": found["copy"],
            "norms": (found["norms"], without["norms"]),
        }
    return outcome


def _trained(rank: int, args: Args) -> dict[str, Any]:
    from slime.backends.megatron_utils.hf_weights.export import export_hf

    actor = start_actor(args, rank, args.actor_num_gpus_per_node)
    metrics = []
    for _ in range(3):
        metrics.append(actor.train(0, my_rows(actor, 0)).metrics)
        if args.offload_train:
            actor.sleep()
            actor.wake_up()
    weights = {name: t.clone() for name, t in export_hf(actor.chunks, actor._weights)}
    return {
        "weights": weights,
        "losses": [m.get("train/mtp_loss", 0.0) for m in metrics],
        "norms": [m["train/grad_norm"] for m in metrics],
        "copy": _copy_gap(actor, weights["model.embed_tokens.weight"]),
    }


def _copy_gap(actor: Any, embedding: torch.Tensor) -> float:
    """How far the embedding that the last stage has of its own is from the first stage's."""
    chunk = actor.chunks[-1]
    gap = torch.zeros(())
    if actor.parallel.pp_size > 1 and hasattr(chunk, "mtp"):
        copy = chunk.embedding.word_embeddings.weight.detach()
        gap = (copy[: len(embedding)] - embedding).abs().max()
    torch.distributed.all_reduce(gap, torch.distributed.ReduceOp.MAX)
    return float(gap)
