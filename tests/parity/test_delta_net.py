"""Gated delta nets by Megatron: any packing, training in every layout, checkpoints as they are published.

Hugging Face's model computes one sample at a time, so no state of it can reach another sample.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.packing import join_slices, pack, unpack
from slime.weights.buckets import hf_views
from tests.delta_nets import (
    FAMILIES,
    PUBLISHED,
    UNTRAINED,
    assert_same_gradient,
    assert_same_weights,
    load_all,
    log_probs_and_gradient,
    make_sample_rows,
    publish,
    single_log_probs,
)
from tests.fsdp import Case, Outcome, naive_model, train_naively
from tests.megatron import (
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
    my_rows,
    start_actor,
    train_megatron,
    whole_weights,
)
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

TYPES = {"qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
SIZES = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: str(make_tiny_checkpoint(folder / family, family, weight_scale=3.0, **SIZES))
        for family in FAMILIES
    }


def in_checkpoint_names(tensors: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    return dict(hf_views(tensors.items(), model_type=TYPES[family]))


# ---- any packing

PACKED_IN: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "DP": ("qwen3_next", ()),
    "TP SP": ("qwen3_next", (SP,)),
    "PP": ("qwen3_5_moe", (PP,)),
    "CP": ("qwen3_5", (CP,)),
    "MoE CP": ("qwen3_5_moe", (CP,)),
}
Packing = tuple[list[int], list[list[int]]]  # lengths of samples, samples of each micro-batch


def random_packings(seed: int, count: int = 5) -> list[Packing]:
    """Up to five samples of up to three chunks of the scan, in random order and micro-batches."""
    rng, packings = random.Random(seed), []
    for _ in range(count):
        lens = [rng.randint(2, 140) for _ in range(rng.randint(1, 5))]
        order = rng.sample(range(len(lens)), len(lens))
        cuts = sorted({0, len(lens), *(rng.randint(0, len(lens)) for _ in range(2))})
        packings.append((lens, [order[first:last] for first, last in pairwise(cuts)]))
    return packings


PACKINGS = {name: random_packings(seed) for seed, name in enumerate(PACKED_IN)}


def compute_packed(rank: int, cases: dict[str, Any]) -> dict[str, list[Any]]:
    from tests.parity.megatron_model import MegatronTrainer

    found = {}
    for name, args in cases.items():
        model = MegatronTrainer(args)
        found[name] = [one_packing(model, args, *packing) for packing in PACKINGS[name]]
    return found


def one_packing(model: Any, args: Any, lens: list[int], micro_batches: list[list[int]]) -> Any:
    from slime.backends.megatron_utils.parallel import all_gather, context_group, unwrapped

    model.load(Path(args.hf_checkpoint))
    rows = make_sample_rows(lens)
    batches = [pack(rows, samples, model.parallel) for samples in micro_batches]

    def read(chunk: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        return model.head.log_probs(unwrapped(chunk), hidden, batch, with_entropy=False)[0]

    def loss(chunk: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        return (read(chunk, hidden, batch) * (batch.position_ids + 1).cos()).sum()

    columns = {}
    for batch, values in zip(
        batches, model.passes.collect(model.chunks, batches, read), strict=False
    ):
        whole = join_slices(all_gather(values, context_group()), batch)
        for row, column in zip(
            batch.rows, unpack(whole, batch, cp_size=model.parallel.cp_size), strict=True
        ):
            columns[row] = torch.from_numpy(column)
    model.optimizer.zero_grad()
    model.passes.train(model.model, batches, loss)
    for chunk in model.chunks:
        for param in chunk.parameters():
            param.data.copy_(param.main_grad / model.parallel.dp_size)
    return columns, model.exported()


@pytest.fixture(scope="module")
def packed(models: dict[str, str]) -> list[dict[str, list[Any]]]:
    cases = {
        name: megatron_args(Case(model=models[family]), 2, *layouts)
        for name, (family, layouts) in PACKED_IN.items()
    }
    return run_megatron_ranks(compute_packed, 2, cases)


@pytest.mark.parametrize("name", PACKED_IN)
def test_no_packing_changes_a_sample(name, packed, models):
    """Micro-batches of random samples in random order: log-probs and gradients of single samples."""
    family, _ = PACKED_IN[name]
    theirs = naive_model(Case(model=models[family]))
    for number, (lens, _) in enumerate(PACKINGS[name]):
        expected = single_log_probs(theirs, make_sample_rows(lens))
        single, grads = log_probs_and_gradient(theirs, expected)
        columns, found = packed[1][name][number]  # the last stage of the pipeline
        for sample, column in enumerate(single):
            torch.testing.assert_close(columns[sample], column, rtol=0, atol=2e-5)
        assert_same_gradient(found, in_checkpoint_names(grads, family))


# ---- training

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.01}
BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
Settings = dict[str, tuple[str, tuple[dict[str, Any], ...]]]
ONE: Settings = {
    "padded": ("qwen3_5", (PADDED,)),
    "full recompute": ("qwen3_next", (FULL_RECOMPUTE,)),
    "selective recompute": ("qwen3_5", (SELECTIVE,)),
}
TWO: Settings = {
    "DP distributed optimizer": ("qwen3_5", (DIST_OPT, BUDGET)),
    "TP": ("qwen3_5", (TP,)),
    "TP SP padded": ("qwen3_5", (SP, PADDED)),
    "PP": ("qwen3_next", (PP, BUDGET)),
    "VPP": ("qwen3_5", (VPP,)),
    "CP padded": ("qwen3_5", (CP, PADDED)),
    "EP distributed optimizer": ("qwen3_5_moe", (EP, DIST_OPT)),
    "CP recompute": ("qwen3_next", (CP, FULL_RECOMPUTE)),
}
FOUR: Settings = {
    "TP SP CP": ("qwen3_5", (SP, CP)),
    "TP SP PP": ("qwen3_5", (SP, PP)),
    "VPP CP recompute": ("qwen3_5", (VPP, CP, FULL_RECOMPUTE)),
    "TP SP EP": ("qwen3_next", (SP, EP, ETP1)),
    "CP EP overlap": ("qwen3_5_moe", (CP, EP, OVERLAP)),
}


@pytest.fixture(scope="module")
def cases(models: dict[str, str]) -> dict[str, Case]:
    """Two steps per rollout, with a reference."""
    return {f: Case(model=models[f], steps=2, flags=KL) for f in FAMILIES}


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    outcomes = {}
    for family, case in cases.items():
        found = train_naively(case)
        grads, weights = (in_checkpoint_names(x, family) for x in (found.grads, found.weights))
        outcomes[family] = replace(found, grads=grads, weights=weights)
    return outcomes


def train_all(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, Outcome]:
    return {name: train_megatron(args, rank, world_size) for name, args in cases.items()}


@pytest.mark.parametrize(
    "world_size, settings", [(1, ONE), (2, TWO), (4, FOUR)], ids=["1", "2", "4"]
)
def test_gradients_and_weights_are_those_of_the_naive_loop(world_size, settings, cases, naive):
    args = {
        name: megatron_args(cases[family], world_size, *layouts)
        for name, (family, layouts) in settings.items()
    }
    trained = run_megatron_ranks(train_all, world_size, world_size, args)[0]
    for name, (family, _) in settings.items():
        if not args[name].use_distributed_optimizer:
            assert_same_gradient(trained[name].grads, naive[family].grads)
        assert_same_weights(trained[name].weights, naive[family], cases[family].steps, name)


# ---- weights under the names of published checkpoints


@pytest.fixture(scope="module")
def published(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return publish(models, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def exports(published: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("exports"))
    return run_megatron_ranks(export_all, 2, published, folder)[0]


def export_all(rank: int, published: dict[str, str], folder: str) -> dict[str, Any]:
    """What engines get and what is exported, before and after training."""
    found = {}
    for name, model in published.items():
        actor = start_actor(megatron_args(Case(model=model), 2, SP), rank, 2)
        sent, path = whole_weights(actor), f"{folder}/{name}"
        actor.export_hf(f"{path}/before")
        actor.train(0, my_rows(actor, 0))
        actor.export_hf(f"{path}/after")
        found[name] = {"sent": sent, "folder": path}
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_go_back_bit_for_bit_under_the_names_they_came_with(name, exports, published):
    original, found = load_all(published[name]), exports[name]
    exported = load_all(found["folder"] + "/before")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[n], tensor) for n, tensor in original.items())
    trained = {n for n in original if not n.startswith(UNTRAINED)}
    assert found["sent"].keys() == trained
    assert all(torch.equal(found["sent"][n], original[n]) for n in trained)


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_moves_all_but_mtp_layers_and_the_vision_tower(name, exports, published):
    original, after = load_all(published[name]), load_all(exports[name]["folder"] + "/after")
    for tensor_name, tensor in original.items():
        assert torch.equal(after[tensor_name], tensor) == tensor_name.startswith(UNTRAINED)
