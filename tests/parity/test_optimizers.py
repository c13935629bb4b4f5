"""Muon and SGD of the Megatron trainer: against plain loops on whole matrices, and across a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.args import make_args
from tests.naive_optimizers import QUINTIC, NaiveMuon, newton_schulz, relative_error
from tests.parity.test_families import tokens
from tests.parity.tiny_families import make_family
from tests.rank_pool import run_megatron_ranks

LR, DECAY, STEPS = 1e-2, 0.1, 3
HEAD_DIM = 16  # of gated attention in the tiny model with delta nets
TP = {"tensor_model_parallel_size": 2}
MUON: dict[str, Any] = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
HALF = {"bf16": True, "muon_fp32_matmul_prec": "medium"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("qwen3", MUON),
    "nesterov": ("qwen3", {**MUON, "muon_use_nesterov": True, "muon_momentum": 0.8}),
    "qkv together": ("qwen3", {**MUON, "muon_split_qkv": False}),
    "blocks": ("qwen3", {**MUON, **TP}),
    "duplicated": ("qwen3", {**MUON, **TP, "muon_tp_mode": "duplicated"}),
    "distributed": ("qwen3", {**MUON, **TP, "muon_tp_mode": "distributed"}),
    "spread": ("qwen3", {**MUON, "optimizer": "dist_muon"}),
    "experts": ("qwen3_moe", {**MUON, "expert_model_parallel_size": 2}),
    "delta nets": ("qwen3_5", MUON),
    "delta nets together": ("qwen3_5", {**MUON, "muon_split_qkv": False}),
    "delta nets in blocks": ("qwen3_5", {**MUON, **TP}),
    "delta nets distributed": ("qwen3_5", {**MUON, **TP, "muon_tp_mode": "distributed"}),
}
RESUMED: dict[str, dict[str, Any]] = {
    "muon": {**MUON, **TP},
    "muon in bf16": {**MUON, **HALF},
    "muon, delta nets in bf16": {**MUON, **HALF, **TP},
    "dist_muon": {**MUON, "optimizer": "dist_muon"},
    "dist_muon in bf16": {**MUON, **HALF, "optimizer": "dist_muon"},
    "sgd": {"optimizer": "sgd"},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("optimizers")
    for family in ("qwen3", "qwen3_moe", "qwen3_5"):
        make_family(folder / family, family)
    return run_megatron_ranks(_run_all, 2, str(folder))[0]


@pytest.mark.parametrize("case", CASES)
def test_muon_is_the_plain_loop(results, case):
    start, grads, found = results[case]
    wanted = _naively(start, grads, CASES[case][1])
    for name, weight in found.items():
        error = relative_error(weight, wanted[name], start[name])
        assert error < 2e-3, (name, error)


def test_sgd_is_the_plain_loop(results):
    start, grads, found = results["sgd"]
    weights = {name: weight.double() for name, weight in start.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in grads:
        for name, weight in weights.items():
            decay = DECAY if weight.ndim > 1 else 0.0
            momenta[name] = 0.9 * momenta[name] + _clipped(step)[name] + decay * weight
            weights[name] = weight - LR * momenta[name]
    for name, weight in found.items():
        assert relative_error(weight, weights[name], start[name]) < 1e-3, name


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_bitwise_the_unbroken_one(results, case):
    unbroken, resumed = results["resumed", case]
    for name, weight in unbroken.items():
        assert torch.equal(resumed[name], weight), name


def test_state_of_muon_is_spread_over_the_ranks(results):
    """Of dist_muon half is on each rank; of muon everything on both."""
    whole, half = results["held"]
    assert half < 0.6 * whole


def _run_all(rank: int, folder: str) -> dict[Any, Any]:
    root = Path(folder)
    results: dict[Any, Any] = {
        case: _train(root / family, flags) for case, (family, flags) in CASES.items()
    }
    results["sgd"] = _train(root / "qwen3", {"optimizer": "sgd"})
    for number, (case, flags) in enumerate(RESUMED.items()):
        saved = root / f"saved{number}"
        saved.mkdir(exist_ok=True)
        family = "qwen3_5" if "delta nets" in case else "qwen3"
        results["resumed", case] = _resume(root / family, saved, flags)
    results["held"] = [_held(root / "qwen3", MUON | {"optimizer": kind}) for kind in _KINDS]
    return results


_KINDS = ("muon", "dist_muon")


def _args(checkpoint: Path, flags: dict[str, Any]) -> Any:
    return make_args(
        train_backend="megatron",
        hf_checkpoint=str(checkpoint),
        actor_num_gpus_per_node=2,
        lr=LR,
        lr_decay_style="constant",
        weight_decay=DECAY,
        adam_eps=1e-4,
        **flags,
    )


def _trainer(checkpoint: Path, flags: dict[str, Any]) -> Any:
    from tests.parity.megatron_model import MegatronTrainer

    trainer = MegatronTrainer(_args(checkpoint, flags))
    trainer.load(checkpoint)
    return trainer


def _train(checkpoint: Path, flags: dict[str, Any]) -> tuple[Any, Any, Any]:
    """First weights, the gradient of each step, last weights, by Hugging Face names."""
    from tests.parity.megatron_model import packed

    trainer = _trainer(checkpoint, flags)
    start, grads = trainer.exported(), []
    for _ in range(STEPS):
        trainer.optimizer.zero_grad()
        trainer.passes.train(trainer.model, [packed(tokens(), trainer.parallel)], trainer._loss)
        grads.append(_exported_gradients(trainer))
        trainer.optimizer.step()
    return start, grads, trainer.exported()


@torch.no_grad()
def _exported_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    params = [param for chunk in trainer.chunks for param in chunk.parameters()]
    weights = [param.detach().clone() for param in params]
    for param in params:
        param.copy_(param.main_grad)
    exported = trainer.exported()
    for param, weight in zip(params, weights, strict=True):
        param.copy_(weight)
    return exported


def _resume(checkpoint: Path, saved: Path, flags: dict[str, Any]) -> tuple[Any, Any]:
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    trainer = _trainer(checkpoint, flags)
    trainer.train(tokens())
    steps = trainer.optimizer.num_steps
    Checkpointer("qwen3").save(saved, 0, trainer.chunks, trainer.optimizer, num_steps=steps)
    other = MegatronTrainer(_args(checkpoint, flags))
    Checkpointer("qwen3").load(saved, other.chunks, other.optimizer)
    for one in (trainer, other):
        one.train(tokens())
        one.train(tokens())
    return trainer.exported(), other.exported()


def _held(checkpoint: Path, flags: dict[str, Any]) -> int:
    trainer = _trainer(checkpoint, flags)
    return sum(count * tensor.numel() for tensor, count in trainer.optimizer.moments())


def _naively(start: Any, grads: list[Any], flags: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gate and up are one matrix for Megatron; in blocks, each tensor rank has a part of every matrix."""
    blocks = 2 if "tensor_model_parallel_size" in flags and "muon_tp_mode" not in flags else 1
    naive = NaiveMuon(
        matrix=_is_matrix,
        orthogonal=lambda name, momentum: momentum,
        decay=DECAY,
        beta=flags.get("muon_momentum", 0.95),
        nesterov=flags.get("muon_use_nesterov", False),
        eps=1e-4,
    )
    weights = dict(start)
    for step in grads:
        updates: dict[str, torch.Tensor] = {}
        momenta = _by_kind(_momenta(naive, _clipped(step)))
        for names in _together(list(momenta), flags.get("muon_split_qkv", True)):
            updates |= _orthogonal({name: momenta[name] for name in names}, blocks)
        updates = _as_stored(updates)
        naive.orthogonal = lambda name, _, updates=updates: updates[name]
        naive.step(weights, step, LR, 1.0)
    return weights


def _momenta(naive: NaiveMuon, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the loop will orthogonalise in its next step."""
    momenta = {}
    for name, grad in grads.items():
        before = naive.state.get(name, [torch.zeros_like(grad)])[0]
        momentum = naive.beta * before + (1 - naive.beta) * grad
        ahead = naive.beta * momentum + (1 - naive.beta) * grad
        momenta[name] = ahead if naive.nesterov else momentum
    return momenta


def _by_kind(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split tensors with rows of several kinds: of a delta net, and queries with gates, head by head."""
    gated = any("linear_attn" in name for name in tensors)
    parts: dict[str, torch.Tensor] = {}
    for name, rows in tensors.items():
        if "in_proj_qkv" in name:
            parts |= {f"{name}:{kind}": part for kind, part in enumerate(rows.chunk(3))}
        elif gated and "q_proj" in name:
            heads = rows.unflatten(0, (-1, 2, HEAD_DIM))
            parts |= {f"{name}:{kind}": heads[:, kind].flatten(0, 1) for kind in range(2)}
        else:
            parts[name] = rows
    return parts


def _as_stored(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors: dict[str, list[torch.Tensor]] = {}
    for name, part in parts.items():
        tensors.setdefault(name.partition(":")[0], []).append(part)
    return {
        name: torch.cat(kinds)
        if "q_proj" not in name
        else torch.stack([rows.unflatten(0, (-1, HEAD_DIM)) for rows in kinds], dim=1).flatten(0, 2)
        for name, kinds in tensors.items()
    }


def _together(names: list[str], split_qkv: bool) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in filter(_is_matrix, names):
        key = name.replace("gate_proj", "up_proj")
        if not split_qkv:
            key = re.sub(r"(q_proj|k_proj|v_proj|in_proj_\w+)\.weight(:\d)?", "qkv", key)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _orthogonal(parts: dict[str, torch.Tensor], blocks: int) -> dict[str, torch.Tensor]:
    """Of matrices stacked by rows; rows may be in any order, as long as they come back in it."""
    dim = 1 if any(re.search("o_proj|down_proj|out_proj", name) for name in parts) else 0
    if any(".gate.weight" in name for name in parts):  # the router is whole on every rank
        blocks = 1
    done = {name: [] for name in parts}
    for block in range(blocks):
        some = {name: part.chunk(blocks, dim=dim)[block] for name, part in parts.items()}
        whole = torch.cat(list(some.values()))
        update = max(whole.shape) ** 0.5 * newton_schulz(whole, 5, QUINTIC)
        sizes = [len(part) for part in some.values()]
        for name, piece in zip(some, update.split(sizes), strict=True):
            done[name].append(piece)
    return {name: torch.cat(pieces, dim=dim) for name, pieces in done.items()}


def _clipped(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
    return {name: grad.double() * min(1.0, 1.0 / (norm + 1e-6)) for name, grad in grads.items()}


def _is_matrix(name: str) -> bool:
    return not re.search("embed_tokens|lm_head|norm|conv1d|A_log|dt_bias", name)
