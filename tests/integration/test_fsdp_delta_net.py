"""Models with gated delta nets, trained by the FSDP backend on packed samples, are Hugging Face's own.

Hugging Face's model computes one sample at a time here, so no state of it can reach another sample.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
)

from slime.backends.fsdp_utils.delta_net import pack_delta_nets
from slime.backends.fsdp_utils.model import PACKED_ATTENTION, HeadOptions, PackedCausalLM
from slime.core.errors import UserError
from slime.core.packing import pack
from slime.core.types import ParallelInfo, RolloutBatch
from slime.rollout.train_data import split_batch
from slime.weights.fp8 import convert_to_fp8, dequantize, load_causal_lm
from slime.weights.fp8_format import Fp8Format
from tests.delta_nets import (
    FAMILIES,
    PUBLISHED,
    UNTRAINED,
    assert_same_gradient,
    load_all,
    log_probs_and_gradient,
    make_sample_rows,
    publish,
    single_log_probs,
)
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

BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}
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
        name: Case(model=models[family], steps=steps, flags=flags)
        for name, (family, steps, flags) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: train_naively(case) for name, case in cases.items()}


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, cases: dict[str, Case]) -> dict[str, Outcome]:
    return run_fsdp_ranks(train_on_ranks, request.param, request.param, cases)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_the_naive_loop(name, trained, naive):
    assert_same_gradient(trained[name].grads, naive[name].grads)


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_after_training_are_those_of_the_naive_loop(name, trained, naive):
    for parameter, expected in naive[name].weights.items():
        torch.testing.assert_close(trained[name].weights[parameter], expected, rtol=1e-5, atol=3e-6)


# ---- any packing


def packed_model(model: str) -> PackedCausalLM:
    hf = AutoModelForCausalLM.from_pretrained(model, attn_implementation=PACKED_ATTENTION)
    pack_delta_nets(hf, padded=False)
    return PackedCausalLM(hf, HeadOptions(temperature=1.0, chunk_size=64))


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
    expected = single_log_probs(theirs, rows)
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
    with pytest.raises(UserError, match="no boundaries of packed samples"):
        hf.model.layers[0].linear_attn(hf.model.embed_tokens(tokens))


# ---- checkpoints, adapters, and weights under the names of published checkpoints


@pytest.fixture(scope="module")
def published(models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return publish(models, tmp_path_factory.mktemp("published"))


def _export(rank: int, model: str, folder: str) -> dict[str, Any]:
    """What engines get and what is exported, before and after a step."""
    args = Case(model=model, flags=BUDGET).args()
    actor = start_actor(args, rank, 2)
    sent = {name: tensor.clone() for bucket in actor.hf_buckets() for name, tensor in bucket}
    actor.export_hf(f"{folder}/before")
    actor.train(0, _rows(args, 0, rank))
    actor.export_hf(f"{folder}/after")
    return {"sent": sent, "folder": folder}


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_go_back_bit_for_bit_under_the_names_they_came_with(name, others, published):
    original, found = load_all(published[name]), others["exports"][name]
    exported = load_all(found["folder"] + "/before")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[n], tensor) for n, tensor in original.items())
    trained = {n for n in original if not n.startswith(UNTRAINED)}
    assert found["sent"].keys() == trained
    assert all(torch.equal(found["sent"][n], original[n]) for n in trained)


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_moves_all_but_mtp_layers_and_the_vision_tower(name, others, published):
    original, after = (
        load_all(published[name]),
        load_all(others["exports"][name]["folder"] + "/after"),
    )
    for tensor_name, tensor in original.items():
        kept = tensor_name.startswith(UNTRAINED)
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


def test_an_export_of_an_fp8_checkpoint_is_unquantized(published, tmp_path):
    """That includes its MTP layers, which are copied and not trained."""
    layout = Fp8Format(strategy="block", block=(16, 16))
    convert_to_fp8(Path(published["qwen3_next"]), tmp_path / "fp8", layout)
    stored = load_all(str(tmp_path / "fp8"))
    run_fsdp_ranks(_export_once, 1, str(tmp_path / "fp8"), str(tmp_path / "out"))
    exported = load_all(str(tmp_path / "out"))
    assert exported.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    copied = {n for n in exported if n.startswith("mtp.") and f"{n}_scale_inv" in stored}
    assert copied
    for name, tensor in exported.items():
        scale = stored.get(f"{name}_scale_inv")
        assert tensor.dtype == torch.float32, name
        wide = stored[name] if scale is None else dequantize(stored[name], scale, layout)
        assert torch.equal(tensor, wide.float()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def _export_once(rank: int, model: str, folder: str) -> None:
    start_actor(Case(model=model, flags=BUDGET).args(), rank, 1).export_hf(folder)


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
