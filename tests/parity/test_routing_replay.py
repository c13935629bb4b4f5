"""Expert choices repeated by Megatron against Hugging Face's model made to choose the same experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.rollout.train_data import split_batch
from tests.fsdp import Case, make_rows, naive_log_probs
from tests.megatron import (
    CP,
    FULL_RECOMPUTE,
    PP,
    SP,
    first_gradient,
    megatron_args,
    my_rows,
    start_actor,
)
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

LAYERS, EXPERTS, TOP = 4, 4, 2
LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "TP SP recompute": (SP, FULL_RECOMPUTE),
    "PP recompute": (PP, FULL_RECOMPUTE),
    "CP": (CP,),
}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, family = tmp_path_factory.mktemp("m") / "m", request.param
    options = {"num_hidden_layers": LAYERS, "weight_scale": 4.0, **FAMILIES[family]}
    model = make_tiny_checkpoint(folder, family, **options)
    return Case(model=str(model), flags={"micro_batch_size": 3})


def test_training_repeats_the_engines_choices(case: Case):
    """With random experts: log-probs and gradients equal those of a model with the same forced choices."""
    experts = _random_experts()
    hf = _forced(case.model)
    expected = [
        _forced_log_probs(hf, row, experts[row], case.args()) for row in range(len(experts))
    ]
    args = {
        name: megatron_args(case, 2, *layout).replace(use_rollout_routing_replay=True)
        for name, layout in LAYOUTS.items()
    }
    for name, found in run_megatron_ranks(_replay, 2, args, experts)[0].items():
        for row, column in found["log_probs"].items():
            mask = make_rows(0).loss_masks[row] > 0
            np.testing.assert_allclose(
                column[mask], expected[row][mask], atol=2e-5, err_msg=f"{name}, row {row}"
            )


def test_training_repeats_the_choices_of_the_log_prob_pass(case: Case):
    """Routers are changed in between: what they choose now would be other experts."""
    args = {
        name: megatron_args(case, 2, *layout, use_routing_replay=True)
        for name, layout in LAYOUTS.items()
    }
    for name, found in run_megatron_ranks(_record_and_replay, 2, args)[0].items():
        assert found["differ"] > 0.1, f"{name}: the routers chose alike anyway"
        assert found["same"] == 1.0, name


def test_with_both_the_engines_choices_win_and_the_rest_is_recorded(case: Case):
    """The engine reports no experts for some tokens: the log-prob pass chooses there, once."""
    args = {
        name: megatron_args(case, 2, *layout, use_routing_replay=True).replace(
            use_rollout_routing_replay=True
        )
        for name, layout in LAYOUTS.items()
    }
    experts = [rows.copy() for rows in _random_experts()]
    for rows in experts:
        rows[-2:] = -1
    for name, held in run_megatron_ranks(_record_over_engine, 2, args, experts)[0].items():
        for given, kept in zip(experts, held, strict=True):
            mine = (kept >= 0).any(axis=(0, 2))  # layers of this pipeline stage
            assert mine.any() and (kept[:, mine] >= 0).all(), name
            reported = np.broadcast_to(given >= 0, given.shape) & mine[None, :, None]
            assert (kept[reported] == given[reported]).all(), name


def test_a_rank_without_rows_records_the_choices_of_its_dummies(case: Case):
    """One sample on two data ranks: the second repeats it in a dummy, with the same choices."""
    args = megatron_args(case, 2, use_routing_replay=True)
    first, second = run_megatron_ranks(_record_one_row, 2, args)
    assert [first["dummy"], second["dummy"]] == [False, True]
    assert (first["experts"] >= 0).all() and (first["experts"] == second["experts"]).all()


def _record_one_row(rank: int, args: Any) -> dict[str, Any]:
    actor = start_actor(args, rank, 2)
    batch = split_batch(args, make_rows(0).select([0]), dp_size=2, cp_size=1)[rank]
    actor.log_probs(batch, "actor")
    (experts,) = batch.routed_experts
    return {"experts": experts, "dummy": (-1, 0) in batch.schedule.dummies}


def _record_over_engine(
    rank: int, cases: dict[str, Any], experts: list[np.ndarray]
) -> dict[str, list[np.ndarray]]:
    found = {}
    for name, args in cases.items():
        actor = start_actor(args, rank, 2)
        batch = my_rows(actor, 0)
        batch.routed_experts = [experts[row] for row in _rows_of_rank(actor, len(experts))]
        actor.log_probs(batch, "actor")
        found[name] = batch.routed_experts
    return found


def _replay(rank: int, cases: dict[str, Any], experts: list[np.ndarray]) -> dict[str, Any]:
    found = {}
    for name, args in cases.items():
        actor = start_actor(args, rank, 2)
        batch = my_rows(actor, 0)
        here = actor.parallel
        rows = _rows_of_rank(actor, len(experts))
        batch.routed_experts = [experts[row] for row in rows]
        columns = actor.log_probs(batch, "actor")
        found[name] = {"log_probs": dict(zip(rows, columns, strict=True)), "rank": here.rank}
        assert np.isfinite(sum(float(g.abs().sum()) for g in first_gradient(actor).values()))
    return found


def _record_and_replay(rank: int, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: _one_record(args, rank) for name, args in cases.items()}


def _one_record(args: Any, rank: int) -> dict[str, float]:
    """How many choices of changed routers differ, and how many are the recorded ones when repeated."""
    actor = start_actor(args, rank, 2)
    batch = my_rows(actor, 0)
    actor.log_probs(batch, "actor")
    recorded = batch.routed_experts
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for chunk in actor.chunks:
            for layer in chunk.decoder.layers:
                weight = layer.mlp.router.weight
                weight.copy_(torch.randn(weight.shape, generator=generator))
    free = my_rows(actor, 0)
    actor.log_probs(free, "actor")
    batch.routed_experts = recorded
    actor.log_probs(batch, "actor")  # replays while it records
    mine = np.concatenate([r.reshape(-1) for r in recorded])
    held = mine >= 0  # layers of this pipeline stage
    others = np.concatenate([r.reshape(-1) for r in free.routed_experts])
    again = np.concatenate([r.reshape(-1) for r in batch.routed_experts])
    return {
        "differ": float((others[held] != mine[held]).mean()),
        "same": float((again[held] == mine[held]).mean()),
    }


def _rows_of_rank(actor: Any, count: int) -> list[int]:
    """These layouts have one data-parallel rank, which has all rows in order."""
    assert actor.parallel.dp_size == 1
    return list(range(count))


def _random_experts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    experts = []
    for tokens in make_rows(0).tokens:
        scores = rng.random((len(tokens), LAYERS, EXPERTS))
        experts.append(np.argsort(scores, axis=-1)[..., :TOP].astype(np.int16))
    return experts


def _forced(path: str) -> torch.nn.Module:
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    hf.set_experts_implementation("eager")
    for layer in hf.model.layers:
        layer.mlp.gate.forward = _ForcedRouter(layer.mlp.gate)
    return hf


class _ForcedRouter:
    """Softmax over all experts, taken at the given ones and renormalised, as Qwen3-MoE does."""

    chosen: torch.Tensor

    def __init__(self, gate: torch.nn.Module) -> None:
        self._gate = gate

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = torch.nn.functional.linear(hidden, self._gate.weight)
        weights = logits.softmax(-1).gather(1, self.chosen)
        return logits, weights / weights.sum(-1, keepdim=True), self.chosen


def _forced_log_probs(hf: torch.nn.Module, row: int, experts: np.ndarray, args: Any) -> np.ndarray:
    for number, layer in enumerate(hf.model.layers):
        layer.mlp.gate.forward.chosen = torch.from_numpy(experts[:, number].astype(np.int64))
    with torch.no_grad():
        return naive_log_probs(hf, make_rows(0), row, args)[0].numpy()
