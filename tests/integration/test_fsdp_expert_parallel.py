"""Expert parallelism with FSDP: gradients, weights and checkpoints do not depend on the number of expert ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime.backends.fsdp_utils.expert_parallel import ExpertGroups
from slime.core.errors import ConfigError, UserError
from slime.rollout.train_data import split_batch
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from tests import fsdp, megatron
from tests.args import make_args
from tests.fsdp import (
    Case,
    Outcome,
    make_rows,
    naive_log_probs,
    naive_model,
    start_actor,
    train_fsdp,
    train_naively,
    whole_weights,
)
from tests.parity.tiny_families import UNTRAINED, make_family
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

BUDGET = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}
# name -> family, ranks, expert ranks, other flags
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "qwen3_moe EP2": ("qwen3_moe", 2, 2, {"micro_batch_size": 2, "clip_grad": 0.05}),
    "qwen2_moe EP2": ("qwen2_moe", 2, 2, BUDGET),
    "kimi_k2 EP2": ("kimi_k2", 2, 2, {**BUDGET, "gradient_checkpointing": True}),
    "glm4_moe_lite EP2": ("glm4_moe_lite", 2, 2, {"micro_batch_size": 3}),
    "glm4_moe_lite": ("glm4_moe_lite", 2, 1, {"micro_batch_size": 3}),
    "qwen3_moe 4 ranks EP2": ("qwen3_moe", 4, 2, {"micro_batch_size": 2, "clip_grad": 0.05}),
    "qwen3_moe 4 ranks EP4": ("qwen3_moe", 4, 4, {**BUDGET, "clip_grad": 0.05}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("experts")
    for family in {case[0] for case in CASES.values()}:
        make_family(base / family, family, vocab_size=320)
    # transformers, the oracle, does not know the type of Kimi-K2.
    renamed = make_family(base / "kimi_k2 for transformers", "kimi_k2", vocab_size=320)
    config = json.loads((renamed / "config.json").read_text())
    del config["auto_map"]
    (renamed / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    return base


def case_of(folder: Path, name: str, *, ranks: int | None = None, ep: int | None = None) -> Case:
    family, own_ranks, own_ep, flags = CASES[name]
    size = {"expert_model_parallel_size": ep or own_ep} if (ep or own_ep) > 1 else {}
    gpus = {"actor_num_gpus_per_node": ranks or own_ranks}
    return Case(model=str(folder / family), flags={**flags, **gpus, **size})


def naive_case(folder: Path, name: str) -> Case:
    family, _, _, flags = CASES[name]
    model = "kimi_k2 for transformers" if family == "kimi_k2" else family
    return Case(model=str(folder / model), flags=flags)


def train(rank: int, folder: Path, names: list[str]) -> dict[str, Any]:
    return {name: _train(rank, case_of(folder, name), CASES[name][1]) for name in names}


def _train(rank: int, case: Case, ranks: int) -> dict[str, Any]:
    args = case.args()
    actor = start_actor(args, rank, ranks)
    mine = split_batch(args, make_rows(), dp_size=ranks, cp_size=1)[rank]
    log_probs = dict(zip(mine.sample_indices.tolist(), actor.log_probs(mine, "actor"), strict=True))
    exported = {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket}
    return {
        "log_probs": log_probs,
        "exported": exported,
        "outcome": train_fsdp(case, rank, ranks),
    }


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for ranks in (2, 4):
        names = [name for name, case in CASES.items() if case[1] == ranks]
        answers = run_fsdp_ranks(train, ranks, folder, names)
        found |= {name: [answer[name] for answer in answers] for name in names}
    return found


@pytest.fixture(scope="module")
def naive(folder: Path) -> dict[str, Outcome]:
    return {name: train_naively(naive_case(folder, name)) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_hugging_faces(folder: Path, results, name: str):
    case, rows = naive_case(folder, name), make_rows()
    model = naive_model(case)
    for answer in results[name]:
        for row, found in answer["log_probs"].items():
            if row >= len(rows):
                continue
            with torch.no_grad():
                expected, _ = naive_log_probs(model, rows, row, case.args())
            expected = expected * torch.from_numpy(rows.loss_masks[row])
            masked = torch.from_numpy(found) * torch.from_numpy(rows.loss_masks[row])
            torch.testing.assert_close(masked.float(), expected.float(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_naive_loop(results, naive, name: str):
    for answer in results[name]:
        ours, theirs = answer["outcome"].grads, naive[name].grads
        assert ours.keys() == theirs.keys()
        for parameter, expected in theirs.items():
            gap = (ours[parameter] - expected).abs().max() / expected.abs().max()
            assert gap < 5e-5, f"{parameter}: {gap}"


@pytest.mark.parametrize("name", CASES)
def test_weights_after_clipped_steps_are_those_of_the_naive_loop(results, naive, name: str):
    for parameter, expected in naive[name].weights.items():
        found = results[name][0]["outcome"].weights[parameter]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("name", CASES)
def test_exported_weights_are_those_of_the_checkpoint_to_the_bit(folder: Path, results, name: str):
    family = CASES[name][0]
    stored = load_file(folder / family / "model.safetensors")
    wanted = {n: t for n, t in stored.items() if n not in UNTRAINED.get(family, [])}
    found = results[name][0]["exported"]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], tensor) for n, tensor in wanted.items())


def save(rank: int, folder: Path, name: str, ranks: int) -> None:
    actor = start_actor(case_of(folder, name).args(), rank, ranks)
    actor.train(0, split_batch(actor.args, make_rows(0), dp_size=ranks, cp_size=1)[rank])
    actor.save_to(str(folder / "checkpoint"), 0, force_sync=True)


def resume(rank: int, folder: Path, name: str, ranks: int, ep: int) -> dict[str, torch.Tensor]:
    args = case_of(folder, name, ranks=ranks, ep=ep).args()
    actor = start_actor(args, rank, ranks, checkpoint=str(folder / "checkpoint"))
    actor.train(1, split_batch(args, make_rows(1), dp_size=ranks, cp_size=1)[rank])
    return whole_weights(actor)


def test_a_checkpoint_continues_with_other_numbers_of_ranks_and_expert_ranks(folder, results):
    (folder / "checkpoint").mkdir()
    name = "qwen3_moe EP2"
    run_fsdp_ranks(save, 2, folder, name, 2)
    expected = results[name][0]["outcome"].weights
    for ranks, ep in ((4, 2), (2, 1)):
        found = run_fsdp_ranks(resume, ranks, folder, name, ranks, ep)[0]
        for parameter, weights in expected.items():
            torch.testing.assert_close(found[parameter], weights, rtol=1e-5, atol=3e-6)


# ---- the same by Megatron


def train_both_ways(rank: int, case: Case, backend: str) -> dict[str, Any]:
    """Log-probs of a rank's samples before any step, and all weights after the steps of two rollouts."""
    own = fsdp if backend == "fsdp" else megatron
    args = case.args() if backend == "fsdp" else megatron.megatron_args(case, 2)
    actor = own.start_actor(args, rank, 2)
    mine = split_batch(args, make_rows(), dp_size=2, cp_size=1)[rank]
    log_probs = dict(zip(mine.sample_indices.tolist(), actor.log_probs(mine, "actor"), strict=True))
    for rollout_id in range(2):
        rows = make_rows(rollout_id)
        actor.train(rollout_id, split_batch(args, rows, dp_size=2, cp_size=1)[rank])
    weights = {name: t.clone() for bucket in actor.hf_buckets() for name, t in bucket}
    return {"log_probs": log_probs, "weights": weights}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_two_expert_ranks_train_as_those_of_megatron(tmp_path, family: str):
    pytest.importorskip("megatron.core")
    model = make_tiny_checkpoint(tmp_path, family, weight_scale=3.0)
    flags = {**BUDGET, "clip_grad": 0.05, "actor_num_gpus_per_node": 2}
    case = Case(model=str(model), steps=2, flags={**flags, "expert_model_parallel_size": 2})
    ours = run_fsdp_ranks(train_both_ways, 2, case, "fsdp")
    theirs = run_megatron_ranks(train_both_ways, 2, case, "megatron")
    columns = [
        {r: c for answer in both for r, c in answer["log_probs"].items()} for both in (ours, theirs)
    ]
    assert columns[0].keys() == columns[1].keys() >= set(range(len(make_rows())))
    for row, found in columns[0].items():
        np.testing.assert_allclose(found, columns[1][row], rtol=0, atol=2e-5)
    start, expected = load_file(model / "model.safetensors"), theirs[0]["weights"]
    assert ours[0]["weights"].keys() == expected.keys() == start.keys()
    for name, weights in expected.items():
        assert not torch.equal(weights, start[name]), name
        torch.testing.assert_close(ours[0]["weights"][name], weights, rtol=1e-5, atol=5e-6)


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_the_slots_of_the_example():
    groups: Any = ExpertGroups(exchange=Group(2), shards=Group(2))  # pyright: ignore[reportArgumentType]
    assert groups.slots(8).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8}


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 2}, {}, "has no experts: remove it"),
        (MOE, {"actor_num_gpus_per_node": 3}, "does not divide the 3 training GPUs"),
        (
            MOE,
            {"actor_num_gpus_per_node": 6},
            "the 8 experts of a layer are not a multiple of the 6",
        ),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 2, "num_local_experts": 8},
            {},
            "experts with biases are not spread over ranks",
        ),
        *(
            (
                MOE,
                {"lora_rank": 4, "lora_target_modules": ["q_proj", target]},
                "experts with adapters are not spread over ranks",
            )
            for target in ("experts", "gate_up_proj", "mlp.experts.down_proj")
        ),
        (
            {
                **MOE,
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
            {"lora_rank": 4, "lora_target_modules": ["q_proj"]},
            "experts that stay in FP8 are not spread over ranks: remove it, or give bf16 weights",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_before_a_start(tmp_path, config, flags, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"actor_num_gpus_per_node": 2, **flags, "expert_model_parallel_size": 2}
    with pytest.raises(ConfigError) as error:
        make_args(hf_checkpoint=str(tmp_path), train_backend="fsdp", **given)
    assert words in str(error.value)


def test_adapters_of_shared_experts_are_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    given = {"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2, "lora_rank": 4}
    targets = ["shared_experts.down_proj"]
    options = {"hf_checkpoint": str(tmp_path), "train_backend": "fsdp"}
    args = make_args(**options, **given, lora_target_modules=targets)
    assert args.lora_target_modules == targets


def build_gpt_oss(rank: int, folder: str) -> str:
    case = Case(model=folder, flags={"actor_num_gpus_per_node": 2})
    args = case.args().replace(expert_model_parallel_size=2)
    with pytest.raises(UserError) as error:
        start_actor(args, rank, 2)
    return str(error.value)


def test_experts_of_another_layout_are_refused_by_name(tmp_path):
    make_family(tmp_path, "gpt_oss", vocab_size=320)
    for said in run_fsdp_ranks(build_gpt_oss, 2, str(tmp_path)):
        assert "model.layers.0.mlp.experts has gate_up_proj_bias" in said


def build_on_fp8(rank: int, folder: str, base: str) -> str:
    flags = {"actor_num_gpus_per_node": 2, "lora_rank": 4, "lora_target_modules": ["q_proj"]}
    case = Case(model=folder, ref=base, flags={**flags, "lora_merge_for_rollout": True})
    with pytest.raises(UserError) as error:
        start_actor(case.args(expert_model_parallel_size=2), rank, 2)
    return str(error.value)


def test_experts_of_another_base_in_fp8_are_refused_too(tmp_path):
    plain = make_tiny_checkpoint(tmp_path / "plain", "qwen3_moe")
    convert_to_fp8(plain, tmp_path / "fp8", Fp8Format(strategy="block"))
    for said in run_fsdp_ranks(build_on_fp8, 2, str(plain), str(tmp_path / "fp8")):
        assert "model.layers.0.mlp.experts is a Qwen3MoeExperts in FP8" in said
