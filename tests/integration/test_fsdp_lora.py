"""Adapters trained by the FSDP backend are those that `peft` trains, in any layout and file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from slime.backends.fsdp_utils.lora_experts import adapter_module
from slime.cli import main as slime_command
from slime.config.peft_files import PEFT_PREFIX
from slime.core.errors import UserError
from slime.rollout.train_data import split_batch
from slime.weights.buckets import hf_views
from slime.weights.peft_folder import to_peft
from tests.fsdp import (
    Case,
    Outcome,
    first_gradient,
    make_rows,
    naive_log_probs,
    start_actor,
    train_naively,
    whole_weights,
)
from tests.peft_runs import (
    BUDGET,
    KL,
    hf_names,
    peft_case,
    peft_model,
    peft_outcome,
    with_shared_outer,
)
from tests.ppo import start_pair, train_pair
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

# family, configuration of peft, flags of the run
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (
        "qwen3",
        {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
        {**KL, **BUDGET, "global_batch_size": 4},
    ),
    "llama_checkpointed": (
        "llama",
        {"r": 3, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
        {"micro_batch_size": 3, "gradient_checkpointing": True},
    ),
    "qwen3_moe": ("qwen3_moe", {"r": 4, "target_modules": ["q_proj", "o_proj"]}, BUDGET),
    "experts": (
        "qwen3_moe",
        {
            "r": 3,
            "lora_alpha": 9,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        {**KL, **BUDGET, "gradient_checkpointing": True},
    ),
    "experts_down": (
        "qwen3_moe",
        {"r": 8, "target_modules": [], "target_parameters": ["experts.down_proj"]},
        {"micro_batch_size": 3},
    ),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Each starts from a PEFT folder that `peft` wrote, with A and B other than zero."""
    folder, found = tmp_path_factory.mktemp("lora"), {}
    for name, (family, config, flags) in SETTINGS.items():
        model = str(make_tiny_checkpoint(folder / family, family, weight_scale=3.0))
        found[name] = peft_case(model, folder / "adapters" / name, config, flags)
    return found


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: peft_outcome(case) for name, case in cases.items()}


@pytest.fixture(scope="module", params=[1, 2, 3])
def trained(request: pytest.FixtureRequest, cases, tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("trained"))
    return run_fsdp_ranks(_train_all, request.param, request.param, cases, folder)[0]


def _in_peft_form(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return adapters, of experts too, by PEFT's names, and other weights as they are."""
    return {
        **dict(to_peft(_adapters_of(named).items())),
        **{n: t for n, t in named.items() if ".lora_" not in n},
    }


def _adapters_of(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {adapter_module(n): t for n, t in named.items() if ".lora_" in n}


def _train_all(rank: int, world_size: int, cases: dict[str, Case], folder: str) -> dict:
    return {
        name: _train(rank, world_size, case, f"{folder}/{name}") for name, case in cases.items()
    }


def _train(rank: int, world_size: int, case: Case, folder: str) -> dict[str, Any]:
    """Train twice; return the outcome, what the engines would get, and what was exported."""
    args = case.args()
    actor = start_actor(args, rank, world_size)
    before = whole_weights(actor)

    def rows(rollout_id: int):
        return split_batch(args, make_rows(rollout_id), dp_size=world_size, cp_size=1)[rank]

    grads = _in_peft_form(first_gradient(actor, rows(0)))
    metrics = [actor.train(rollout_id, rows(rollout_id)).metrics for rollout_id in range(2)]
    after = whole_weights(actor)
    actor.export_hf(folder)
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    return {
        "outcome": Outcome(grads=grads, weights=_in_peft_form(after), metrics=metrics),
        "changed": changed,
        "adapters": {name for name in after if ".lora_" in name},
        "states": set(actor.optimizer.state_tensors()),
        "merged": {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket},
        "log_probs": actor.log_probs(rows(0), "actor") if world_size == 1 else None,
        "export": folder,
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_peft(name, trained, naive):
    ours, theirs = trained[name]["outcome"].grads, naive[name].grads
    assert ours.keys() == theirs.keys()
    for parameter, expected in theirs.items():
        scale = expected.abs().max()
        torch.testing.assert_close(ours[parameter] / scale, expected / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_adapters_after_training_are_those_of_peft(name, trained, naive):
    for parameter, expected in naive[name].weights.items():
        ours = trained[name]["outcome"].weights[parameter]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_only_adapters_move_and_have_optimizer_state(name, trained, naive):
    adapters = trained[name]["adapters"]
    assert trained[name]["changed"] == adapters and len(adapters) == len(naive[name].weights)
    moments = ("exp_avg", "exp_avg_sq")
    assert trained[name]["states"] == {f"{n}.{moment}" for n in adapters for moment in moments}


@pytest.mark.parametrize("name", SETTINGS)
def test_peft_loads_the_export_and_its_merge_is_what_engines_get(name, trained, cases):
    case, found = cases[name], trained[name]
    peft = peft_model(case, found["export"])
    held = hf_names(dict(peft.named_parameters()))
    for parameter, ours in found["outcome"].weights.items():
        if ".lora_" in parameter:
            assert torch.equal(held[parameter], ours), parameter
    merged = dict(hf_views(peft.merge_and_unload().state_dict().items(), model_type="qwen3_moe"))
    for parameter, sent in found["merged"].items():
        torch.testing.assert_close(sent, merged[parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probs_are_those_of_peft_after_training(name, trained, cases):
    ours, case = trained[name]["log_probs"], cases[name]
    if ours is None:
        return  # rows are split over ranks; gradients compare them already
    peft = peft_model(case, trained[name]["export"])
    rows = make_rows(0)
    with torch.no_grad():
        theirs = [naive_log_probs(peft, rows, i, case.args())[0] for i in range(len(rows))]
    order = {tuple(tokens): i for i, tokens in enumerate(map(tuple, rows.tokens))}
    mine = split_batch(case.args(), make_rows(0), dp_size=1, cp_size=1)[0]
    for row, column in enumerate(ours):
        expected = theirs[order[tuple(mine.tokens[row])]].numpy() * mine.loss_masks[row]
        np.testing.assert_allclose(column, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3", "experts", "experts_down"])
def test_merge_lora_writes_the_model_that_peft_merges(cases, tmp_path, name):
    case = cases[name]
    adapter, output = case.flags["lora_adapter_path"], tmp_path / "merged"
    command = ["convert", "merge-lora", "--base", case.model, "--adapter", adapter]
    assert slime_command([*command, "--output-dir", str(output)]) == 0
    merged = peft_model(case).merge_and_unload().state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(output).state_dict().items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-6)


# ---- experts with shared outer matrices


@pytest.fixture(scope="module")
def shared(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Case:
    return with_shared_outer(cases["experts"], tmp_path_factory.mktemp("shared"), num_experts=4)


def _train_shared(rank: int, world_size: int, case: Case, folder: str, other: str) -> dict:
    args = case.args()
    actor = start_actor(args, rank, world_size)

    def rows(rollout_id: int):
        return split_batch(args, make_rows(rollout_id), dp_size=world_size, cp_size=1)[rank]

    grads = first_gradient(actor, rows(0))
    actor.train(0, rows(0))
    actor.export_hf(folder)
    stepped = whole_weights(actor)
    merged = {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket}
    refused = _error(lambda: start_actor(case.args(lora_adapter_path=other), rank, world_size))
    return {"grads": grads, "stepped": stepped, "merged": merged, "refused": refused}


def test_experts_share_outer_matrices(shared, cases, tmp_path):
    other = cases["experts"].flags["lora_adapter_path"]
    folder = str(tmp_path / "export")
    found = run_fsdp_ranks(_train_shared, 3, 3, shared, folder, other)[0]
    assert "lora_A.weight of --lora-adapter-path differs between experts" in found["refused"]
    peft = hf_names(train_naively(shared, peft_model(shared, trainable=True)).grads)
    experts = "model.layers.1.mlp.experts"
    expected = {  # the gradient of a shared matrix is the sum over the experts
        "gate_up_proj.lora_A": peft[f"{experts}.base_layer.lora_A.weight"].view(4, 3, 64).sum(0),
        "down_proj.lora_B": peft[f"{experts}.lora_B.weight"].view(64, 3, 4).sum(-1),
        "down_proj.lora_A": peft[f"{experts}.lora_A.weight"].view(4, 3, 32),
    }
    for name, gradient in expected.items():
        ours = found["grads"][f"{experts}.lora.{name}.weight"]
        torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=2e-6)
    exported = load_file(Path(folder) / "adapter_model.safetensors")
    for name, tensor in dict(to_peft(_adapters_of(found["stepped"]).items())).items():
        assert torch.equal(exported[PEFT_PREFIX + name], tensor)
    merged = peft_model(shared, folder).merge_and_unload().state_dict()
    for name, weight in hf_views(merged.items(), model_type="qwen3_moe"):
        torch.testing.assert_close(found["merged"][name], weight, rtol=1e-5, atol=1e-6)


# ---- a new adapter: B = 0


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Dropout must not show outside the training pass."""
    folder = tmp_path_factory.mktemp("fresh")
    model = make_tiny_checkpoint(folder / "model", weight_scale=3.0)
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "lora_dropout": 0.25, **KL, **BUDGET}
    return Case(model=str(model), flags={**flags, "save": str(folder / "save")})


@pytest.fixture(scope="module")
def fresh_experts(fresh: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("m"), "qwen3_moe", weight_scale=3.0)
    targets = {"lora_target_modules": ["all-linear", "experts"], "lora_dropout": 0.0}
    return Case(model=str(model), flags={**fresh.flags, **targets})


def _start_fresh(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    args = case.args()
    actor = start_actor(args, rank, world_size)
    mine = split_batch(args, make_rows(), dp_size=world_size, cp_size=1)[rank]
    precision = {"bf16": args.precision == "bf16"}
    base = start_actor(
        Case(model=case.model, flags={**BUDGET, **precision}).args(), rank, world_size
    )
    same = [actor.log_probs(mine, "actor"), actor.log_probs(mine, "ref")]
    expected = base.log_probs(mine, "actor")
    sent = {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket}
    base_weights = dict(hf_views(whole_weights(base).items(), model_type="qwen3_moe"))
    adapters = {n: t for n, t in whole_weights(actor).items() if ".lora_" in n}
    actor.train(0, split_batch(args, make_rows(), dp_size=world_size, cp_size=1)[rank])
    return {
        "equal": [all(map(np.array_equal, one, expected)) for one in same],
        "sent_is_base": all(torch.equal(t, base_weights[n].to(t.dtype)) for n, t in sent.items()),
        "adapters": adapters,
        "ref_after": all(map(np.array_equal, actor.log_probs(mine, "ref"), expected)),
        "actor_after": all(map(np.array_equal, actor.log_probs(mine, "actor"), expected)),
        "frozen": list(actor.frozen),
        "dtypes": {(".lora_" in n, p.dtype) for n, p in actor.model.params.items()},
    }


def test_in_bf16_the_base_is_held_in_bf16_and_adapters_in_fp32(fresh):
    found = run_fsdp_ranks(_start_fresh, 2, 2, replace(fresh, flags={**fresh.flags, "bf16": True}))
    for rank in found:
        assert rank["dtypes"] == {(False, torch.bfloat16), (True, torch.float32)}
        assert rank["equal"] == [True, True] and rank["sent_is_base"]
        assert rank["ref_after"] and not rank["actor_after"]


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_new_adapter_changes_no_bit_and_is_the_same_on_any_ranks(fresh, fresh_experts, experts):
    fresh = fresh_experts if experts else fresh
    one = run_fsdp_ranks(_start_fresh, 1, 1, fresh)[0]
    two = run_fsdp_ranks(_start_fresh, 2, 2, fresh)
    for found in (one, *two):
        assert found["equal"] == [True, True]
        assert found["sent_is_base"]
        assert found["frozen"] == []  # the reference is the base: no second copy
        assert found["ref_after"] and not found["actor_after"]
    assert one["adapters"].keys() == two[0]["adapters"].keys()
    for name, value in one["adapters"].items():
        assert torch.equal(value, two[0]["adapters"][name])
        assert bool(value.any()) == ("lora_A" in name)


# ---- checkpoints


def _resume(rank: int, case: Case, other: Case, path: str) -> dict[str, Any]:
    """Save after the first rollout; a second actor loads it and both train on the second."""
    args = case.args()

    def rows(rollout_id: int):
        return split_batch(args, make_rows(rollout_id), dp_size=2, cp_size=1)[rank]

    first = start_actor(args, rank, 2)
    first.train(0, rows(0))
    if rank == 0:
        Path(path).mkdir()
    torch.distributed.barrier()
    first.save_to(path, 0)
    second = start_actor(args, rank, 2, checkpoint=path)
    loaded = whole_weights(first), whole_weights(second)
    second.load(path)  # the state of the random generator of dropout too
    second.train(1, rows(1))
    after_second = whole_weights(second)
    first.load(path)
    first.train(1, rows(1))
    after_first = whole_weights(first)
    return {
        "loaded": _equal(*loaded),
        "stepped": _equal(after_first, after_second) and not _equal(loaded[0], after_first),
        "refused": _error(lambda: start_actor(other.args(), rank, 2, checkpoint=path)),
    }


def _train_ppo(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Save both models after the first rollout; a second pair loads them and both train on."""
    args = case.args()
    pair = start_pair(args, rank, 1)
    before = [whole_weights(one) for one in pair]
    train_pair(pair, range(1))
    paths = f"{folder}/actor", f"{folder}/critic"
    for one, path in zip(pair, paths, strict=True):
        Path(path).mkdir()
        one.save_to(path, 0)
    resumed = start_pair(args, rank, 1, paths)
    train_pair(pair, range(1, 2))
    train_pair(resumed, range(1, 2))
    after = [whole_weights(one) for one in pair]
    return {
        "changed": [
            {name for name, weight in old.items() if not torch.equal(weight, new[name])}
            for old, new in zip(before, after, strict=True)
        ],
        "resumed": [_equal(*map(whole_weights, both)) for both in zip(pair, resumed, strict=True)],
        "names": [set(one.model.params) for one in pair],
    }


def test_a_critic_trains_adapters_and_its_head(fresh, tmp_path):
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "advantage_estimator": "ppo"}
    case = Case(model=fresh.model, flags={**flags, "kl_coef": 0.1, "micro_batch_size": 3})
    found = run_fsdp_ranks(_train_ppo, 1, case, str(tmp_path))[0]
    for head, changed, names in zip(
        (set(), {"lm_head.weight"}), found["changed"], found["names"], strict=True
    ):
        adapters = {name for name in names if ".lora_" in name}
        assert changed == adapters | head
    assert found["resumed"] == [True, True]


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[n]) for n, t in one.items())


def _error(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as found:
        action()
    return str(found.value)


def test_a_checkpoint_holds_adapters_alone_and_resumes_bit_for_bit(fresh, tmp_path):
    other_base = make_tiny_checkpoint(tmp_path / "other", seed=5, weight_scale=3.0)
    other = Case(model=str(other_base), flags=fresh.flags)
    path = tmp_path / "checkpoint"
    for found in run_fsdp_ranks(_resume, 2, fresh, other, str(path)):
        assert found["loaded"] and found["stepped"]
        assert "holds adapters of another base" in found["refused"]
        assert fresh.model in found["refused"]
    names = FileSystemReader(path / "fsdp").read_metadata().state_dict_metadata
    assert names and all(".lora_" in name for name in names)
