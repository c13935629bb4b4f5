"""Qwen3-VL and Qwen3.5 with images by Megatron: log-probs and gradients in every layout.

Hugging Face's model computes one sample at a time, with its own positions and masks.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from slime.cli import main as command
from slime.core.batches import Pixels
from slime.core.errors import ConfigError, UserError
from slime.core.packing import join_slices, pack, unpack
from slime.core.types import RolloutBatch
from slime.data.images import load_image_processor
from tests.delta_nets import assert_same_gradient, assert_same_weights, load_all
from tests.fsdp import Case, Outcome, naive_model, train_naively
from tests.megatron import (
    CP,
    EP,
    ETP1,
    FULL_RECOMPUTE,
    OVERLAP,
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
from tests.tiny_vision import (
    IMAGE,
    VISION_END,
    VISION_START,
    make_image,
    make_image_rows,
    make_vision_checkpoint,
)

SIZES = {"num_hidden_layers": 4}
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": SIZES,
    "qwen3_vl_moe": SIZES,
    "qwen3_5": HYBRID,
    "qwen3_5_moe": HYBRID,
}
PUBLISHED = "qwen3_vl_moe published"
WEIGHTS = "model.safetensors"
LAYOUTS: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "DP": ("qwen3_vl", ()),
    "TP": ("qwen3_vl", (TP,)),
    "TP SP": ("qwen3_vl", (SP,)),
    "PP": ("qwen3_vl", (PP,)),
    "CP": ("qwen3_vl", (CP,)),
    "SP recompute": ("qwen3_vl", (SP, FULL_RECOMPUTE)),
    "hybrid VPP": ("qwen3_5", (VPP,)),
    "MoE EP": ("qwen3_vl_moe", (EP,)),
    "MoE TP EP": (PUBLISHED, (SP, EP, ETP1)),
    "hybrid CP": ("qwen3_5", (CP,)),
    "hybrid MoE EP": ("qwen3_5_moe", (EP,)),
}
# Images of each sample, as (width, height); the same image occurs in two samples.
IMAGES = [[(32, 16)], [], [(16, 40), (24, 24)], [(32, 16)], [(8, 8)]]
MICRO_BATCHES = [[3, 0, 1], [2, 4]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    models = {
        family: str(make_vision_checkpoint(folder / family, family, **sizes))
        for family, sizes in FAMILIES.items()
    }
    models[PUBLISHED] = publish(Path(models["qwen3_vl_moe"]), folder / PUBLISHED)
    return models


def publish(model: Path, folder: Path) -> str:
    """Store the experts as [experts, in, out], as Qwen3-VL is published."""
    shutil.copytree(model, folder)
    stored = load_file(model / "model.safetensors")
    for name in stored:
        if ".experts." in name:
            stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def make_samples(model: str) -> tuple[RolloutBatch, list[list[Pixels]]]:
    """Texts with images between, and everything but the first token as the response."""
    processor = load_image_processor(model)
    rng = np.random.default_rng(0)
    tokens, pixels = [], []
    for sizes in IMAGES:
        files = [make_image(*size, seed=sum(size)) for size in sizes]
        ids = rng.integers(0, 250, 5).tolist()
        for _ in files:
            ids += [VISION_START, IMAGE, VISION_END, *rng.integers(0, 250, 7).tolist()]
        tokens.append(processor.expand(ids, files))
        pixels.append([processor.pixels(data) for data in files])
    table = list({id(image): image for row in pixels for image in row}.values())
    ones = [np.ones(len(row) - 1, np.float32) for row in tokens]
    number = np.arange(len(tokens))
    rows = RolloutBatch(
        tokens=[np.array(row) for row in tokens],
        response_lens=np.array([len(row) for row in ones]),
        loss_masks=ones,
        loss_weights=ones,
        rewards=np.zeros(len(tokens)),
        raw_rewards=np.zeros(len(tokens)),
        truncated=np.zeros(len(tokens)),
        group_indices=number,
        sample_indices=number,
        trajectory_ids=number,
        positions=[
            processor.positions(row, [image.grid for image in images])
            for row, images in zip(tokens, pixels, strict=True)
        ],
        images=[_places(processor, *row, table) for row in zip(tokens, pixels, strict=True)],
        pixels=table,
    )
    return rows, pixels


def _places(processor: Any, tokens: list[int], images: list[Pixels], table: list[Pixels]) -> Any:
    starts = processor.places(tokens, [image.grid for image in images])
    rows = [
        (
            next(i for i, x in enumerate(table) if x is image),
            start,
            processor.num_tokens(image.grid),
        )
        for image, start in zip(images, starts, strict=True)
    ]
    return np.array(rows, np.int32).reshape(-1, 3)


def weight(length: int) -> torch.Tensor:
    """Of each token in the loss: all different."""
    return torch.arange(1, length + 1).cos()


# ---- Megatron


def compute(rank: int, cases: dict[str, Any]) -> dict[str, Any]:
    from tests.parity.megatron_model import MegatronTrainer

    return {name: one_case(MegatronTrainer(args), args) for name, args in cases.items()}


def one_case(model: Any, args: Any) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    from slime.backends.megatron_utils.parallel import all_gather, context_group, unwrapped

    model.load(Path(args.hf_checkpoint))
    rows, _ = make_samples(args.hf_checkpoint)
    batches = [pack(rows, samples, model.parallel) for samples in MICRO_BATCHES]

    def read(chunk: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        return model.head.log_probs(unwrapped(chunk), hidden, batch, with_entropy=False)[0]

    def loss(chunk: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        return (read(chunk, hidden, batch) * (batch.position_ids + 1).cos()).sum()

    columns = {}
    outputs = model.passes.collect(model.chunks, batches, read)
    for batch, values in zip(batches, outputs, strict=False):
        whole = join_slices(all_gather(values, context_group()), batch)
        unpacked = unpack(whole, batch, cp_size=model.parallel.cp_size)
        columns |= {r: torch.from_numpy(c) for r, c in zip(batch.rows, unpacked, strict=True)}
    model.optimizer.zero_grad()
    model.passes.train(model.model, batches, loss)
    for chunk in model.chunks:
        for param in chunk.parameters():
            param.data.copy_(param.main_grad / model.parallel.dp_size)
    return columns, model.exported()


@pytest.fixture(scope="module")
def computed(models: dict[str, str]) -> list[dict[str, Any]]:
    cases = {
        name: megatron_args(Case(model=models[family]), 2, *layouts)
        for name, (family, layouts) in LAYOUTS.items()
    }
    return run_megatron_ranks(compute, 2, cases)


# ---- one sample at a time


def compute_singly(model: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    hf = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager")
    rows, pixels = make_samples(model)
    columns = []
    for tokens, images in zip(map(torch.tensor, rows.tokens), pixels, strict=True):
        ids = tokens.long()[None]
        inputs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int()}
        if images:
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([x.values for x in images]))
            inputs["image_grid_thw"] = torch.tensor([x.grid for x in images])
        logits = hf(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
        columns.append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1))
    sum((c * weight(len(c))).sum() for c in columns).backward()
    grads = {n: p.grad for n, p in hf.named_parameters() if ".visual." not in n}
    return [c.detach() for c in columns], grads


@pytest.fixture(scope="module")
def singly(models: dict[str, str]) -> dict[str, Any]:
    return {family: compute_singly(model) for family, model in models.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_single_samples(name, computed, singly):
    columns, grads = singly[LAYOUTS[name][0]]
    found = [one[name] for one in computed]
    for log_probs, _ in found:
        for row, column in log_probs.items():
            torch.testing.assert_close(column, columns[row], rtol=0, atol=2e-5)
    assert any(set(log_probs) == set(range(len(columns))) for log_probs, _ in found)
    exported = found[0][1]
    assert_same_gradient(in_module_names(exported, grads), grads)


def in_module_names(
    exported: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Stack the experts that a checkpoint has one by one, as Hugging Face's modules have them."""
    found = {}
    for name, grad in grads.items():
        if name in exported:
            published = exported[name].shape != grad.shape and ".experts." in name
            found[name] = exported[name].transpose(1, 2) if published else exported[name]
            continue
        prefix, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        found[name] = torch.stack(
            [
                torch.cat([exported[f"{prefix}.{expert}.{part}.weight"] for part in parts])
                for expert in range(len(grad))
            ]
        )
    return found


# ---- training, with the tower and without

KEYS = {"multimodal_keys": {"image": "images"}}
TOWER = {**KEYS, "freeze_vision_tower": False}
Settings = dict[str, tuple[str, tuple[dict[str, Any], ...]]]
TWO: Settings = {
    "frozen, full recompute": ("qwen3_vl", (KEYS, FULL_RECOMPUTE)),
    "SP": ("qwen3_vl", (TOWER, SP)),
    "PP": ("qwen3_vl", (TOWER, PP)),
    "CP": ("qwen3_vl", (TOWER, CP)),
    "hybrid overlap": ("qwen3_5", (TOWER, OVERLAP)),
    "MoE EP": ("qwen3_vl_moe", (TOWER, EP)),
}
FOUR: Settings = {"SP CP": ("qwen3_vl", (TOWER, SP, CP)), "TP PP": ("qwen3_vl", (TOWER, TP, PP))}


def vision_case(model: str) -> Case:
    return Case(model=model, steps=2, make_rows=partial(make_image_rows, model))


@pytest.fixture(scope="module")
def naive(models: dict[str, str]) -> dict[tuple[str, bool], Outcome]:
    outcomes = {}
    for family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5"):
        for trained in (True, False):
            case = vision_case(models[family])
            model = naive_model(case)
            model.model.visual.requires_grad_(trained)
            outcomes[family, trained] = train_naively(case, model)
    return outcomes


def train_all(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, Outcome]:
    return {name: train_megatron(args, rank, world_size) for name, args in cases.items()}


@pytest.mark.parametrize("world_size, settings", [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_gradients_and_weights_are_those_of_the_naive_loop(world_size, settings, models, naive):
    args = {
        name: megatron_args(vision_case(models[family]), world_size, *flags)
        for name, (family, flags) in settings.items()
    }
    trained = run_megatron_ranks(train_all, world_size, world_size, args)[0]
    for name, (family, flags) in settings.items():
        expected = naive[family, TOWER in flags]
        sent = set(trained[name].weights)
        assert any("visual" in parameter for parameter in sent) == (TOWER in flags)
        if not args[name].use_distributed_optimizer:
            assert_same_gradient(
                in_module_names(trained[name].grads, expected.grads), expected.grads
            )
        weights = in_module_names(trained[name].weights, expected.weights)
        assert_same_weights(weights, expected, vision_case(models[family]).steps, name)


# ---- weights and checkpoints


@pytest.fixture(scope="module")
def stored(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_megatron_ranks(store, 2, models, str(tmp_path_factory.mktemp("stored")))[0]


def store(rank: int, models: dict[str, str], folder: str) -> dict[str, Any]:
    """Export before training, train, save, and load under another layout."""
    exported = {}
    for name, model in models.items():
        flags = TOWER if name == "qwen3_vl" else KEYS
        actor = start_actor(megatron_args(vision_case(model), 2, flags, SP), rank, 2)
        exported[name] = f"{folder}/{name}"
        actor.export_hf(exported[name])
        if flags is not TOWER:
            continue
        actor.train(0, my_rows(actor, 0))
        Path(folder, "checkpoint").mkdir(exist_ok=True)
        actor.save_to(f"{folder}/checkpoint", 0, force_sync=True)
        saved = whole_weights(actor)
        other = start_actor(megatron_args(vision_case(model), 2, TOWER, PP), rank, 2)
        other.load(f"{folder}/checkpoint")
        found = whole_weights(other)
        exported["loaded"] = all(torch.equal(found[n], tensor) for n, tensor in saved.items())
        exported["tensors"] = len(saved)
        exported["saved"] = saved
        exported["checkpoint"] = f"{folder}/checkpoint"
        frozen = start_actor(megatron_args(vision_case(model), 2, KEYS, PP), rank, 2)
        try:
            frozen.load(f"{folder}/checkpoint")
            exported["refusal"] = ""
        except UserError as error:
            exported["refusal"] = str(error)
    return exported


@pytest.mark.parametrize("name", [*FAMILIES, PUBLISHED])
def test_weights_go_back_bit_for_bit(name, stored, models):
    original = load_file(Path(models[name]) / WEIGHTS)
    exported = load_all(stored[name])
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[n], tensor) for n, tensor in original.items())


def test_a_trained_tower_is_in_checkpoints_of_another_layout(stored, models):
    assert stored["loaded"]
    assert stored["tensors"] == len(load_file(Path(models["qwen3_vl"]) / WEIGHTS))


def test_a_converted_checkpoint_has_the_trained_tower(stored, models, tmp_path):
    words = ["--input-dir", stored["checkpoint"], "--output-dir", str(tmp_path / "hf")]
    converted = ["torch-dist-to-hf", *words, "--origin-hf-dir", models["qwen3_vl"]]
    assert command(["convert", *converted]) == 0
    found, original = load_all(str(tmp_path / "hf")), load_file(Path(models["qwen3_vl"]) / WEIGHTS)
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored["saved"].items())
    changed = {name for name, tensor in original.items() if not torch.equal(found[name], tensor)}
    assert any(name.startswith("model.visual.") for name in changed)


def test_a_frozen_tower_does_not_replace_a_trained_one(stored):
    assert "was saved with a trained vision tower" in stored["refusal"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({**TOWER, **FULL_RECOMPUTE}, "use --recompute-granularity selective"),
        ({**TOWER, "optimizer": "muon"}, "is not for a trained tower"),
        ({**KEYS, "qkv_format": "bshd"}, "remove --qkv-format bshd"),
    ],
)
def test_options_that_do_not_go_with_images_are_refused(flags, message, models):
    with pytest.raises(ConfigError, match=message):
        megatron_args(vision_case(models["qwen3_vl"]), 2, flags)
