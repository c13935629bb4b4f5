"""Models with a vision tower, trained by the FSDP backend on packed samples, are Hugging Face's own.

Hugging Face's model computes one sample at a time here, with its own positions.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.model_size import CountRequest, count_models
from slime.core.packing import pack, unpack
from slime.core.types import ParallelInfo
from slime.rollout.train_data import split_batch
from tests.delta_nets import load_all
from tests.fsdp import (
    EPS,
    LR,
    Case,
    Outcome,
    naive_log_probs,
    naive_model,
    start_actor,
    train_naively,
    train_on_ranks,
    whole_weights,
)
from tests.rank_pool import run_fsdp_ranks
from tests.tiny_vision import make_image_rows, make_vision_checkpoint

FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
STORED = [*FAMILIES, "published_moe"]  # whose experts are transposed
BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 96}
TRAINED = {"freeze_vision_tower": False}
GRAD_ATOL = 2e-6
# family, steps per rollout, flags
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vl": ("qwen3_vl", 1, BUDGET),
    "vl_tower": ("qwen3_vl", 2, {**TRAINED, "micro_batch_size": 1}),  # ranks without images
    "vl_tower_checkpointed": (
        "qwen3_vl",
        1,
        {**TRAINED, "micro_batch_size": 3, "gradient_checkpointing": True},
    ),
    "vl_dense_mask": ("qwen3_vl", 1, {**BUDGET, "attn_implementation": "sdpa"}),
    "vl_moe": ("published_moe", 1, {**TRAINED, **BUDGET}),
    "dense_delta": ("qwen3_5", 1, {**TRAINED, "micro_batch_size": 4}),
    "moe_delta": ("qwen3_5_moe", 1, BUDGET),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"moe_intermediate_size": 48}  # 2 x 48 differs from the hidden size
    found = {
        family: str(
            make_vision_checkpoint(folder / family, family, **(sizes if "moe" in family else {}))
        )
        for family in FAMILIES
    }
    shutil.copytree(found["qwen3_vl_moe"], folder / "published")
    published = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_all(found["qwen3_vl_moe"]).items()
    }
    save_file(published, folder / "published" / "model.safetensors", metadata={"format": "pt"})
    return {**found, "published_moe": str(folder / "published")}


def vision_case(model: str, steps: int = 1, **flags: Any) -> Case:
    flags = {"multimodal_keys": {"image": "images"}, **flags}
    return Case(model=model, steps=steps, flags=flags, make_rows=partial(make_image_rows, model))


@pytest.fixture(scope="module")
def cases(models: dict[str, str]) -> dict[str, Case]:
    return {
        name: vision_case(models[family], steps, **flags)
        for name, (family, steps, flags) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    outcomes = {}
    for name, case in cases.items():
        model = naive_model(case)
        model.model.visual.requires_grad_(not case.flags.get("freeze_vision_tower", True))
        outcomes[name] = train_naively(case, model)
    return outcomes


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, cases: dict[str, Case]) -> dict[str, Outcome]:
    return run_fsdp_ranks(train_on_ranks, request.param, request.param, cases)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_naive_loop(name, trained, naive):
    ours, theirs = trained[name].grads, naive[name].grads
    assert ours.keys() == theirs.keys()
    assert any("visual" in parameter for parameter in ours) == (
        "freeze_vision_tower" in SETTINGS[name][2]
    )
    for parameter, expected in theirs.items():
        torch.testing.assert_close(ours[parameter], expected, rtol=1e-4, atol=GRAD_ATOL)


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_after_training_are_those_of_the_naive_loop(name, trained, naive, cases):
    # A step is LR * m / (sqrt(v) + EPS): near zero it multiplies the gradient's error by LR / EPS. Weights that
    # differ after the first rollout add to the error in the second one, hence twice the sum of both.
    norm = torch.stack([grad.norm() for grad in naive[name].grads.values()]).norm()
    atol = 4 * SETTINGS[name][1] * LR / EPS * GRAD_ATOL / float(norm.clamp(min=1))
    before = dict(naive_model(cases[name]).named_parameters())
    for parameter, ours in trained[name].weights.items():
        expected = naive[name].weights.get(parameter)
        if expected is None:  # the frozen tower
            assert torch.equal(ours, before[parameter])
        else:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=max(3e-6, atol))


# ---- any packing


@pytest.fixture(scope="module")
def singles(cases: dict[str, Case]) -> dict[str, list[np.ndarray]]:
    """Log-probs of each row by Hugging Face's model."""
    found = {}
    for name, case in cases.items():
        rows, model = case.rows(), naive_model(case)
        with torch.no_grad():
            columns = [naive_log_probs(model, rows, i, case.args())[0] for i in range(len(rows))]
        found[name] = [
            column.numpy() * mask for column, mask in zip(columns, rows.loss_masks, strict=True)
        ]
    return found


def _log_probs(rank: int, cases: dict[str, Case]) -> dict[str, list[list[np.ndarray]]]:
    """Log-probs of the rows in several orders and micro-batches, by row."""
    rng = np.random.default_rng(0)
    found: dict[str, list[list[np.ndarray]]] = {}
    for name, case in cases.items():
        actor = start_actor(case.args(), rank, 1)
        (batch,) = split_batch(case.args(), case.rows(), dp_size=1, cp_size=1)
        orders = [list(range(10)), list(range(9, -1, -1)), *(rng.permutation(10) for _ in range(3))]
        found[name] = [_in_micro_batches(actor, batch, order) for order in orders]
    return found


def _in_micro_batches(actor: FSDPTrainRayActor, batch: Any, order: Any) -> list[np.ndarray]:
    columns: dict[int, np.ndarray] = {}
    for rows in (order[:4], order[4:5], order[5:]):
        packed = pack(batch, [int(row) for row in rows], ParallelInfo())
        with torch.no_grad():
            values, _ = actor.model.module(packed)
        indices = batch.sample_indices[packed.rows]
        columns |= dict(zip(indices.tolist(), unpack(values, packed), strict=True))
    return [columns[index] for index in range(10)]


def test_no_order_or_micro_batch_changes_a_sample(cases, singles):
    chosen = {name: cases[name] for name in ("vl", "vl_moe", "dense_delta", "moe_delta")}
    found = run_fsdp_ranks(_log_probs, 1, chosen)[0]
    for name, orders in found.items():
        for columns in orders:
            for ours, theirs in zip(columns, singles[name], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


# ---- checkpoints, adapters, exports


def _run_others(rank: int, models: dict[str, str], folder: str) -> dict[str, Any]:
    return {
        "exports": {f: _export(rank, models[f], f"{folder}/{f}") for f in STORED},
        "lora": _train_adapters(rank, models["qwen3_vl"]),
        "resumed": _resume(rank, models["qwen3_vl"], folder),
    }


def _rows(case: Case, rollout_id: int, rank: int) -> Any:
    return split_batch(case.args(), case.rows(rollout_id), dp_size=2, cp_size=1)[rank]


def _sent(actor: FSDPTrainRayActor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in actor.hf_buckets() for name, tensor in bucket}


def _export(rank: int, model: str, folder: str) -> dict[str, Any]:
    """What engines get with a frozen and with a trained tower, and what is exported."""
    frozen = start_actor(vision_case(model, **BUDGET).args(), rank, 2)
    frozen.export_hf(f"{folder}/export")
    moving = start_actor(vision_case(model, **BUDGET, **TRAINED).args(), rank, 2)
    return {"frozen": _sent(frozen), "trained": _sent(moving), "folder": f"{folder}/export"}


def _train_adapters(rank: int, model: str) -> dict[str, torch.Tensor]:
    flags = {**BUDGET, "lora_rank": 4, "lora_merge_for_rollout": True}
    case = vision_case(model, **flags)
    actor = start_actor(case.args(), rank, 2)
    before = whole_weights(actor)
    actor.train(0, _rows(case, 0, rank))
    after = whole_weights(actor)
    return {name: after[name] - before[name] for name in after}


def _resume(rank: int, model: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights after two rollouts, of an unbroken run and of one resumed between them."""
    case = vision_case(model, **BUDGET, **TRAINED)
    actor = start_actor(case.args(), rank, 2)
    actor.train(0, _rows(case, 0, rank))
    path = f"{folder}/iter_0000000"
    Path(path).mkdir(parents=True, exist_ok=True)
    actor.save_to(path, 0, force_sync=True)
    actor.train(1, _rows(case, 1, rank))
    again = start_actor(case.args(), rank, 2, checkpoint=path)
    again.train(1, _rows(case, 1, rank))
    return [whole_weights(actor), whole_weights(again)]


@pytest.fixture(scope="module")
def others(models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_fsdp_ranks(_run_others, 2, models, str(tmp_path_factory.mktemp("others")))[0]


@pytest.mark.parametrize("family", STORED)
def test_weights_go_back_bit_for_bit_and_a_frozen_tower_is_not_sent(family, others, models):
    original, found = load_all(models[family]), others["exports"][family]
    exported = load_all(found["folder"])
    assert exported.keys() == found["trained"].keys() == original.keys()
    language = {name for name in original if not name.startswith("model.visual.")}
    assert found["frozen"].keys() == language and language < original.keys()
    for tensors in (exported, found["trained"], found["frozen"]):
        assert all(torch.equal(tensor, original[name]) for name, tensor in tensors.items())


def test_adapters_are_in_the_language_half_and_move_alone(others, models):
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=r".*(lm_head|visual\..*)")
    hf = AutoModelForImageTextToText.from_pretrained(models["qwen3_vl"])
    expected = {
        name.removeprefix("base_model.model.").replace(".default", "")
        for name, _ in get_peft_model(hf, config).named_parameters()
        if ".lora_" in name
    }
    assert expected and not any("visual" in name for name in expected)
    assert {name for name in others["lora"] if ".lora_" in name} == expected
    assert {name for name, change in others["lora"].items() if change.any()} == expected


def test_a_resumed_run_is_bitwise_the_unbroken_one(others):
    unbroken, resumed = others["resumed"]
    assert all(torch.equal(resumed[name], weight) for name, weight in unbroken.items())


def test_the_plan_counts_the_tower_of_a_run_with_images(models):
    for family in ("qwen3_vl", "qwen3_5"):
        tower = AutoModelForImageTextToText.from_pretrained(models[family]).model.visual
        parameters = sum(param.numel() for param in tower.parameters())
        args = vision_case(models[family]).args()
        (counted,) = count_models([CountRequest(args=args, ranks=[0], world_size=1)])
        (rank,) = counted.ranks
        assert rank.parameters - rank.trained_parameters == parameters
        assert counted.whole.total == rank.parameters
