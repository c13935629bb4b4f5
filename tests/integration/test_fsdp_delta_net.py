"""Models with gated delta nets, trained by the FSDP backend on packed samples, are Hugging Face's own.

Hugging Face's model computes one sample at a time here, so no state of it can reach another sample.
"""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from slime.backends.fsdp_utils.delta_net import pack_delta_nets
from slime.backends.fsdp_utils.model import PACKED_ATTENTION, HeadOptions, PackedCausalLM
from slime.core.errors import UserError
from slime.core.packing import pack
from slime.core.types import ParallelInfo, RolloutBatch
from slime.rollout.train_data import split_batch
from slime.weights.fp8 import Fp8Format, convert_to_fp8, load_causal_lm
from tests.fsdp import (
    Case,
    Outcome,
    make_rows,
    naive_model,
    start_actor,
    train_naively,
    train_on_ranks,
    whole_weights,
)
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
# No engine: the embedded one does not serve these models.
NO_ENGINE = {"load_debug_rollout_data": "/tmp/rows_{rollout_id}.pt"}
BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48, **NO_ENGINE}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.01}
# family, steps per rollout, flags
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "next": ("qwen3_next", 1, {"micro_batch_size": 4}),
    "next_two_steps_kl": ("qwen3_next", 2, {**KL, **BUDGET, "rollout_temperature": 0.7}),
    "dense_checkpointed": ("qwen3_5", 1, {"micro_batch_size": 3, "gradient_checkpointing": True}),
    "dense_dense_mask": ("qwen3_5", 1, {**BUDGET, "attn_implementation": "sdpa"}),
    "dense_padded": ("qwen3_5", 1, {"micro_batch_size": 5, "qkv_format": "bshd"}),
    "moe": ("qwen3_5_moe", 1, BUDGET),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: str(make_tiny_checkpoint(folder / family, family, weight_scale=3.0))
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def cases(models: dict[str, str]) -> dict[str, Case]:
    return {
        name: Case(model=models[family], steps=steps, flags={**NO_ENGINE, **flags})
        for name, (family, steps, flags) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: train_naively(case) for name, case in cases.items()}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, cases: dict[str, Case]) -> dict[str, Outcome]:
    return run_fsdp_ranks(train_on_ranks, request.param, request.param, cases)[0]


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = grad.abs().max().clamp(min=1e-9)
        # Sums over tokens that nearly cancel: one bit of the input changes them by 1e-3 of their size.
        noisy = name.endswith(("A_log", "dt_bias"))
        atol = 5e-3 if noisy else 3e-5
        torch.testing.assert_close(found[name] / scale, grad / scale, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_naive_loop(name, trained, naive):
    assert_same_gradient(trained[name].grads, naive[name].grads)


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_after_training_are_those_of_the_naive_loop(name, trained, naive):
    for parameter, expected in naive[name].weights.items():
        torch.testing.assert_close(trained[name].weights[parameter], expected, rtol=1e-5, atol=3e-6)


# ---- any packing


def make_sample_rows(lens: list[int]) -> RolloutBatch:
    rng, count = np.random.default_rng(sum(lens)), len(lens)
    return RolloutBatch(
        tokens=[rng.integers(0, 256, length) for length in lens],
        response_lens=[length - 1 for length in lens],
        loss_masks=[np.ones(length - 1, np.int8) for length in lens],
        rewards=np.zeros(count),
        raw_rewards=np.zeros(count),
        truncated=np.zeros(count),
        group_indices=np.arange(count),
        sample_indices=np.arange(count),
        trajectory_ids=np.arange(count),
        loss_weights=[np.ones(length - 1, np.float32) for length in lens],
    )


def packed_model(model: str) -> PackedCausalLM:
    hf = AutoModelForCausalLM.from_pretrained(model, attn_implementation=PACKED_ATTENTION)
    pack_delta_nets(hf, padded=False)
    return PackedCausalLM(hf, HeadOptions(temperature=1.0, chunk_size=64))


def log_probs_and_gradient(model: torch.nn.Module, columns: list[torch.Tensor]):
    """Log-probs by sample, and the gradient of a sum that weighs every token otherwise."""
    weighted = sum((c * torch.arange(1, len(c) + 1).cos()).sum() for c in columns)
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(weighted, params)
    return [c.detach() for c in columns], dict(zip(names, grads, strict=True))


@pytest.fixture(scope="module")
def pairs(models: dict[str, str]) -> dict[str, tuple[PackedCausalLM, torch.nn.Module]]:
    return {f: (packed_model(models[f]), naive_model(Case(model=models[f]))) for f in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), lens=st.lists(st.integers(2, 140), min_size=1, max_size=5))
def test_no_packing_changes_a_sample(pairs, family, data, lens):
    """Micro-batches of random samples in random order: log-probs and gradients of single samples."""
    ours, theirs = pairs[family]
    order = data.draw(st.permutations(range(len(lens))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(lens)))) | {0, len(lens)})
    rows = make_sample_rows(lens)
    columns: dict[int, torch.Tensor] = {}
    for first, last in pairwise(cuts):
        batch = pack(rows, order[first:last], ParallelInfo())
        values, _ = ours(batch)
        sizes = [p + r for p, r in zip(batch.prompt_lens, batch.response_lens, strict=True)]
        for row, part in zip(batch.rows, values.split(sizes), strict=True):
            columns[row] = part
    expected = []
    for tokens in map(torch.tensor, rows.tokens):
        logits = theirs(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        expected.append(torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1))
    found, grads = log_probs_and_gradient(ours.hf, [_trained(columns[i]) for i in range(len(lens))])
    single, single_grads = log_probs_and_gradient(theirs, expected)
    for one, other in zip(found, single, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert_same_gradient(grads, single_grads)


def _trained(column: torch.Tensor) -> torch.Tensor:
    """The log-probs of the tokens after the first, which are at the positions before them."""
    return column[:-1]


def test_a_layer_that_is_not_told_of_borders_refuses(models):
    hf = packed_model(models["qwen3_5"]).hf
    tokens = torch.arange(4)[None]
    with pytest.raises(UserError, match="not told where packed samples end"):
        hf.model.layers[0].linear_attn(hf.model.embed_tokens(tokens))


# ---- checkpoints, adapters, and weights under the names of published checkpoints


VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
MTP = {"mtp.fc.weight": (64, 128), "mtp.layers.0.mlp.experts.gate_up_proj": (4, 64, 64)}


@pytest.fixture(scope="module")
def published(models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints as they are published: MTP layers, a vision tower, experts fused or one by one."""
    folder = tmp_path_factory.mktemp("published")
    found = {"qwen3_next": _with_mtp(Path(models["qwen3_next"]), folder / "qwen3_next")}
    for family, config_class in (("qwen3_5", Qwen3_5Config), ("qwen3_5_moe", Qwen3_5MoeConfig)):
        text = AutoConfig.from_pretrained(models[family]).to_dict()
        config = config_class(text_config=text, vision_config=VISION, dtype="float32")
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        model.save_pretrained(folder / f"{family}_unfused")
        found[family] = _with_mtp(folder / f"{family}_unfused", folder / family, fused=True)
    found["qwen3_5_moe_unfused"] = str(folder / "qwen3_5_moe_unfused")
    return found


def _with_mtp(source: Path, target: Path, *, fused: bool = False) -> str:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    tensors |= {name: torch.randn(shape) for name, shape in MTP.items()}
    if fused:
        tensors = _fuse_experts(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def _fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    single = {name for name in tensors if re.search(r"\.experts\.\d+\.", name)}
    fused = {name: tensor for name, tensor in tensors.items() if name not in single}
    for prefix in {name.partition(".experts.")[0] + ".experts" for name in single}:
        parts = [
            [tensors[f"{prefix}.{i}.{part}_proj.weight"] for i in range(4)]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = map(torch.stack, parts)
        fused[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"{prefix}.down_proj"] = down
    return fused


def _export(rank: int, model: str, folder: str) -> dict[str, Any]:
    """What engines get and what is exported, before and after a step."""
    args = Case(model=model, flags=BUDGET).args()
    actor = start_actor(args, rank, 2)
    sent = {name: tensor.clone() for bucket in actor.hf_buckets() for name, tensor in bucket}
    actor.export_hf(f"{folder}/before")
    actor.train(0, _rows(args, 0, rank))
    actor.export_hf(f"{folder}/after")
    return {"sent": sent, "folder": folder}


PUBLISHED = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_unfused"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_go_back_bit_for_bit_under_the_names_they_came_with(name, others, published):
    original, found = load_all(published[name]), others["exports"][name]
    exported = load_all(found["folder"] + "/before")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[n], tensor) for n, tensor in original.items())
    trained = {n for n in original if not n.startswith(("mtp.", "model.visual."))}
    assert found["sent"].keys() == trained
    assert all(torch.equal(found["sent"][n], original[n]) for n in trained)


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_moves_all_but_mtp_layers_and_the_vision_tower(name, others, published):
    original, after = (
        load_all(published[name]),
        load_all(others["exports"][name]["folder"] + "/after"),
    )
    for tensor_name, tensor in original.items():
        kept = tensor_name.startswith(("mtp.", "model.visual."))
        assert torch.equal(after[tensor_name], tensor) == kept, tensor_name


@pytest.mark.parametrize("name", PUBLISHED)
def test_fp8_of_a_published_checkpoint_is_read_again(name, published, tmp_path):
    """Experts are split for it, and the small projections of gates stay as they are."""
    layout = Fp8Format(strategy="block", block=(16, 16))
    convert_to_fp8(Path(published[name]), tmp_path / "fp8", layout)
    stored = load_all(str(tmp_path / "fp8"))
    eight_bits = {n for n, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert any("linear_attn.in_proj_qkv" in n for n in eight_bits)
    assert not any(re.search(r"in_proj_(a|b|ba)\.|mtp\.fc|visual", n) for n in eight_bits)
    assert any(".experts.0.gate_proj" in n for n in eight_bits) == (name != "qwen3_5")
    read, info = load_causal_lm(str(tmp_path / "fp8"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    bf16 = dict(AutoModelForCausalLM.from_pretrained(published[name]).named_parameters())
    for parameter, tensor in read.named_parameters():
        scale = bf16[parameter].abs().max()
        assert (tensor - bf16[parameter]).abs().max() <= scale / 16, parameter


def load_all(folder: str) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.fixture(scope="module")
def others(models, published, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("others"))
    return run_fsdp_ranks(_run_others, 2, models, published, folder)[0]


def _run_others(
    rank: int, models: dict[str, str], published: dict[str, str], folder: str
) -> dict[str, Any]:
    return {
        "resumed": {
            f: _resume(rank, models[f], f"{folder}/{f}") for f in ("qwen3_next", "qwen3_5")
        },
        "lora": _train_adapters(rank, models["qwen3_5"]),
        "exports": {
            name: _export(rank, model, f"{folder}/{name}") for name, model in published.items()
        },
    }


def _rows(args: Any, rollout_id: int, rank: int) -> RolloutBatch:
    return split_batch(args, make_rows(rollout_id), dp_size=2, cp_size=1)[rank]


def _resume(rank: int, model: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights after two rollouts, of an unbroken run and of one resumed between them."""
    args = Case(model=model, flags=BUDGET).args()
    actor = start_actor(args, rank, 2)
    actor.train(0, _rows(args, 0, rank))
    path = f"{folder}/iter_0000000"
    Path(path).mkdir(parents=True, exist_ok=True)
    actor.save_to(path, 0, force_sync=True)
    actor.train(1, _rows(args, 1, rank))
    again = start_actor(args, rank, 2, checkpoint=path)
    again.train(1, _rows(args, 1, rank))
    return [whole_weights(actor), whole_weights(again)]


def _train_adapters(rank: int, model: str) -> dict[str, torch.Tensor]:
    args = Case(
        model=model, flags={**BUDGET, "lora_rank": 4, "lora_merge_for_rollout": True}
    ).args()
    actor = start_actor(args, rank, 2)
    before = whole_weights(actor)
    actor.train(0, _rows(args, 0, rank))
    after = whole_weights(actor)
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_resumed_run_is_bitwise_the_unbroken_one(family, others):
    unbroken, resumed = others["resumed"][family]
    assert all(torch.equal(resumed[name], weight) for name, weight in unbroken.items())


def test_adapters_of_all_linear_layers_are_those_of_peft_and_move_alone(others, models):
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"])
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(models["qwen3_5"]), config)
    prefix = "base_model.model."
    expected = {
        name.removeprefix(prefix).replace(".default", "")
        for name, _ in peft.named_parameters()
        if ".lora_" in name
    }
    moved = {name for name, change in others["lora"].items() if change.any()}
    assert {name for name in others["lora"] if ".lora_" in name} == expected
    assert moved == expected
    assert any("linear_attn.in_proj_qkv" in name for name in moved)
