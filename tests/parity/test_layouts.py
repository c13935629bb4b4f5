"""Megatron in every parallel layout against a naive loop over single samples with Hugging Face, in fp32.

Compared are the gradients of the first step and the weights after two optimizer steps. Several layouts
run in one group of processes: importing megatron takes longer than training these models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slime.weights.buckets import hf_views
from tests.fsdp import Case, Outcome, train_naively, train_on_ranks
from tests.megatron import (
    ALL_GATHER,
    CP,
    DIST_OPT,
    EP,
    ETP1,
    FULL_RECOMPUTE,
    OVERLAP,
    PADDED,
    PP,
    SP,
    TP,
    VPP,
    megatron_args,
    train_megatron,
)
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

# Relative to the largest entry of each tensor.
GRADIENT, WEIGHT = 2e-5, 2e-5

MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "moe": {"family": "qwen3_moe"},
}
SELECTIVE_RECOMPUTE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "layernorm"],
}
TWO_STEPS = {"steps": 2}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "entropy_coef": 0.01}
PER_TOKEN = {"calculate_per_token_loss": True}
BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}


@dataclass(frozen=True)
class Setting:
    model: str
    layouts: tuple[dict[str, Any], ...] = ()
    flags: tuple[dict[str, Any], ...] = ()  # what the naive loop follows too

    def case(self, models: dict[str, str]) -> Case:
        flags = {k: v for part in self.flags for k, v in part.items()}
        steps = flags.pop("steps", 1)
        return Case(model=models[self.model], steps=steps, flags=flags)


ONE = {
    "tied": Setting("tied"),
    "untied": Setting("untied"),
    "moe": Setting("moe"),
    "padded": Setting("tied", (PADDED,)),
    "full recompute": Setting("moe", (FULL_RECOMPUTE,)),
    "selective recompute": Setting("tied", (SELECTIVE_RECOMPUTE,)),
    "two steps, KL, entropy": Setting("tied", (), (TWO_STEPS, KL)),
    "per token": Setting("untied", (DIST_OPT,), (PER_TOKEN,)),
}
TWO = {
    "DP": Setting("tied"),
    "TP": Setting("tied", (TP,)),
    "TP SP": Setting("untied", (SP, FULL_RECOMPUTE, {"data_pad_size_multiplier": 16})),
    "TP SP padded": Setting("untied", (SP, PADDED)),
    "PP": Setting("tied", (PP, BUDGET)),
    "PP padded": Setting("tied", (PP, PADDED)),
    "VPP tied": Setting("tied", (VPP,)),
    "VPP untied": Setting("untied", (VPP,)),
    "CP": Setting("tied", (CP, BUDGET)),
    "CP padded": Setting("untied", (CP, PADDED)),
    "CP KL two steps": Setting("tied", (CP,), (TWO_STEPS, KL)),
    "PP KL two steps": Setting("tied", (PP,), (TWO_STEPS, KL)),
    "TP per token": Setting("tied", (SP,), (PER_TOKEN,)),
    "DP overlap": Setting("tied", (OVERLAP,)),
    "TP SP distributed optimizer": Setting("tied", (SP, DIST_OPT)),
    "EP": Setting("moe", (EP,)),
    "EP all-gather": Setting("moe", (EP, ALL_GATHER)),
    "EP distributed optimizer": Setting("moe", (EP, DIST_OPT)),
    "MoE TP SP": Setting("moe", (SP,)),
    "MoE CP": Setting("moe", (CP, {"data_pad_size_multiplier": 24})),
    "MoE PP": Setting("moe", (PP, DIST_OPT)),
}
FOUR = {
    "TP SP PP tied": Setting("tied", (SP, PP)),
    "TP SP CP": Setting("tied", (SP, CP)),
    "VPP CP recompute": Setting("untied", (VPP, CP, FULL_RECOMPUTE)),
    "TP SP EP": Setting("moe", (SP, EP, ETP1)),
    "TP SP EP, experts cut too": Setting("moe", (SP, EP)),
    "PP EP distributed optimizer": Setting("moe", (PP, EP, DIST_OPT)),
    "CP EP overlap": Setting("moe", (CP, EP, OVERLAP)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "weight_scale": 4.0}
    return {
        name: str(make_tiny_checkpoint(folder / name, **options, **sizes))
        for name, options in MODELS.items()
    }


@pytest.fixture(scope="module")
def naive(models: dict[str, str]) -> dict[str, Outcome]:
    """The naive loop's outcome of every setting, once for those that differ in layout only."""
    outcomes: dict[str, Outcome] = {}
    for settings in (ONE, TWO, FOUR):
        for setting in settings.values():
            key = _key(setting)
            if key not in outcomes:
                outcomes[key] = _in_checkpoint_names(train_naively(setting.case(models)))
    return outcomes


@pytest.mark.parametrize(
    "world_size, settings", [(1, ONE), (2, TWO), (4, FOUR)], ids=["1", "2", "4"]
)
def test_gradients_and_stepped_weights(world_size, settings, models, naive):
    cases = {
        name: megatron_args(setting.case(models), world_size, *setting.layouts)
        for name, setting in settings.items()
    }
    # Rank 0 gathers what all ranks hold.
    for name, outcome in run_megatron_ranks(_train_all, world_size, world_size, cases)[0].items():
        expected = naive[_key(settings[name])]
        if not cases[name].use_distributed_optimizer:
            _compare(f"{name}: gradient of", outcome.grads, expected.grads, GRADIENT)
        _compare(f"{name}: weight", outcome.weights, expected.weights, WEIGHT)


def test_fsdp_and_megatron_agree(models):
    case = Case(model=models["moe"])
    fsdp = run_megatron_ranks(train_on_ranks, 2, 2, {"moe": case})[0]["moe"]
    args = megatron_args(case, 2, SP)
    megatron = run_megatron_ranks(_train_all, 2, 2, {"moe": args})[0]["moe"]
    fsdp = _in_checkpoint_names(fsdp)
    _compare("gradient of", megatron.grads, fsdp.grads, GRADIENT)
    _compare("weight", megatron.weights, fsdp.weights, WEIGHT)
    for name in ("train/loss", "train/pg_loss", "train/grad_norm", "perf/train_tokens"):
        ours, theirs = megatron.metrics[-1][name], fsdp.metrics[-1][name]
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name


def _train_all(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, Outcome]:
    return {name: train_megatron(args, rank, world_size) for name, args in cases.items()}


def _key(setting: Setting) -> str:
    return f"{setting.model} {setting.flags}"


def _compare(
    what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name].float() - tensor).abs().max() / tensor.abs().max().clamp(min=1e-9)
        assert error < limit, f"{what} {name} is off by {error:.1e} of its largest entry"


def _in_checkpoint_names(outcome: Outcome) -> Outcome:
    """Hugging Face's module keeps experts fused; its checkpoints do not. A tied head is not told."""

    def views(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kind = "qwen3_moe" if any("experts" in name for name in tensors) else "qwen3"
        return dict(hf_views(tensors.items(), model_type=kind))

    return Outcome(
        grads=views(outcome.grads), weights=views(outcome.weights), metrics=outcome.metrics
    )
