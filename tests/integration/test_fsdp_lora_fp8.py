"""Adapters on a base that stays in FP8 blocks are those that `peft` trains on the dequantized model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.fsdp_utils.lora_experts import adapter_module
from slime.config.peft_files import PEFT_PREFIX
from slime.core.errors import UserError
from slime.rollout.train_data import split_batch
from slime.weights.buckets import hf_views
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from slime.weights.peft_folder import to_peft
from tests.fsdp import (
    Case,
    Outcome,
    first_gradient,
    make_rows,
    naive_log_probs,
    start_actor,
    whole_weights,
)
from tests.peft_runs import BUDGET, KL, peft_case, peft_model, peft_outcome
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

BLOCK = (128, 128)
# Sizes of more than one block that are no multiples of blocks, of matrices and of halves of experts.
SIZES = {"hidden_size": 160, "intermediate_size": 288, "moe_intermediate_size": 144}
ATTENTION = ["q_proj", "o_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# family, configuration of peft, flags of the run
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {"r": 4, "target_modules": "all-linear"}, {**KL, **BUDGET}),
    "some": (
        "qwen2",  # its q, k and v have biases
        {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        {**BUDGET, "gradient_checkpointing": True},
    ),
    "moe": ("qwen3_moe", {"r": 4, "target_modules": ATTENTION}, {**KL, **BUDGET}),
    "experts": (
        "qwen3_moe",
        {"r": 3, "target_modules": ["q_proj"], "target_parameters": PARAMETERS},
        {**KL, **BUDGET},
    ),
}


def naively_dequantized(fp8: Path, plain: Path, folder: Path) -> Path:
    """The plain checkpoint with every matrix replaced by FP8 values times the scale of their block."""
    shutil.copytree(plain, folder)
    held, (file,) = load_file(fp8 / "model.safetensors"), folder.glob("*.safetensors")
    weights = load_file(file)
    for name in [n for n, t in held.items() if t.dtype == torch.float8_e4m3fn]:
        scales, matrix = held[name + "_scale_inv"], held[name].float()
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                rows = slice(BLOCK[0] * row, BLOCK[0] * (row + 1))
                columns = slice(BLOCK[1] * column, BLOCK[1] * (column + 1))
                matrix[rows, columns] = matrix[rows, columns] * scales[row, column].item()
        weights[name] = matrix
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return (FP8, dequantized) checkpoints by family."""
    root, found = tmp_path_factory.mktemp("fp8"), {}
    for family in ("qwen3", "qwen2", "qwen3_moe"):
        plain = make_tiny_checkpoint(root / family, family, weight_scale=3.0, **SIZES)
        fp8 = root / f"{family}-fp8"
        convert_to_fp8(plain, fp8, Fp8Format(strategy="block", block=BLOCK))
        found[family] = fp8, naively_dequantized(fp8, plain, root / f"{family}-wide")
    return found


@pytest.fixture(scope="module")
def cases(folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Runs on the dequantized checkpoints, each from a folder that `peft` wrote."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: peft_case(str(folders[family][1]), root / name, config, flags)
        for name, (family, config, flags) in SETTINGS.items()
    }


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: peft_outcome(case) for name, case in cases.items()}


def in_fp8(name: str, case: Case, folders: dict[str, tuple[Path, Path]]) -> Case:
    return replace(case, model=str(folders[SETTINGS[name][0]][0]))


@pytest.fixture(scope="module", params=[1, 2, 3])
def trained(request: pytest.FixtureRequest, cases, folders) -> dict[str, dict[str, Any]]:
    runs = {name: in_fp8(name, case, folders) for name, case in cases.items()}
    return run_fsdp_ranks(_train_all, request.param, request.param, runs)[0]


def _train_all(rank: int, world_size: int, cases: dict[str, Case]) -> dict:
    return {name: _train(rank, world_size, case) for name, case in cases.items()}


def _train(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    args = case.args()
    actor = start_actor(args, rank, world_size)
    before = whole_weights(actor)

    def rows(rollout_id: int):
        return split_batch(args, make_rows(rollout_id), dp_size=world_size, cp_size=1)[rank]

    grads = _in_peft_form(first_gradient(actor, rows(0)))
    for rollout_id in range(2):
        actor.train(rollout_id, rows(rollout_id))
    after = whole_weights(actor)
    return {
        "grads": grads,
        "weights": _in_peft_form(after),
        "base_moved": [n for n, t in before.items() if ".lora_" not in n and not same(t, after[n])],
        "base": {n: t.clone() for bucket in actor.base_buckets() for n, t in bucket},
        "merged": {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket},
        "log_probs": actor.log_probs(rows(0), "actor") if world_size == 1 else None,
        "nbytes": {n: p.nbytes for n, p in actor.model.params.items() if ".lora_" not in n},
        "in_fp8": set(actor.model.scales),
    }


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Compare bits: packed FP8 values may read as NaN."""
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def _in_peft_form(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(to_peft({adapter_module(n): t for n, t in named.items() if ".lora_" in n}.items()))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_and_adapters_are_those_of_peft(name, trained, naive):
    ours, theirs = trained[name], naive[name]
    assert ours["grads"].keys() == theirs.grads.keys()
    for parameter, expected in theirs.grads.items():
        scale = expected.abs().max()
        found = ours["grads"][parameter]
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=2e-5)
    for parameter, expected in theirs.weights.items():
        found = ours["weights"][parameter]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_matrices_take_one_byte_per_element_and_do_not_move(name, trained, folders):
    held = load_file(folders[SETTINGS[name][0]][0] / "model.safetensors")
    in_fp8 = {n: t.nbytes for n, t in held.items() if t.dtype == torch.float8_e4m3fn}
    nbytes, scales = trained[name]["nbytes"], trained[name]["in_fp8"]
    assert scales and trained[name]["base_moved"] == []
    ours = sum(nbytes[name.removesuffix("_scale_inv")] for name in scales)
    assert ours == sum(in_fp8.values())
    others = {n for n in nbytes if f"{n}_scale_inv" not in scales}
    assert all(
        "norm" in n or "embed" in n or "gate." in n or "lm_head" in n or "bias" in n for n in others
    )


def with_adapters(case: Case, adapters: dict[str, torch.Tensor]) -> Any:
    """peft's model on the dequantized checkpoint, with these adapters in place of the first ones."""
    peft = peft_model(case)
    state = peft.state_dict()
    for name, value in adapters.items():
        state[PEFT_PREFIX + name.replace(".weight", ".default.weight")].copy_(value)
    return peft


@pytest.mark.parametrize("name", SETTINGS)
def test_engines_are_sent_the_dequantized_base_or_merged_weights(name, trained, cases, folders):
    wide = load_file(folders[SETTINGS[name][0]][1] / "model.safetensors")
    for parameter, sent in trained[name]["base"].items():
        assert torch.equal(sent, wide[parameter]), parameter
    assert trained[name]["base"].keys() == wide.keys()
    peft = with_adapters(cases[name], trained[name]["weights"])
    merged = dict(hf_views(peft.merge_and_unload().state_dict().items(), model_type="qwen3_moe"))
    for parameter, sent in trained[name]["merged"].items():
        torch.testing.assert_close(sent, merged[parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probs_are_those_of_peft(name, trained, cases):
    ours, case = trained[name]["log_probs"], cases[name]
    if ours is None:
        return  # rows are split over ranks; gradients compare them already
    peft = with_adapters(case, trained[name]["weights"])
    mine = split_batch(case.args(), make_rows(0), dp_size=1, cp_size=1)[0]
    with torch.no_grad():
        theirs = [naive_log_probs(peft, mine, i, case.args())[0] for i in range(len(mine))]
    for row, column in enumerate(ours):
        expected = theirs[row].numpy() * mine.loss_masks[row]
        np.testing.assert_allclose(column, expected, rtol=0, atol=2e-5)


# ---- a new adapter


def _start_fresh(rank: int, case: Case) -> dict[str, Any]:
    """Compare with the same checkpoint trained in full, which is dequantized when it is loaded."""
    args = case.args()
    actor = start_actor(args, rank, 2)
    mine = split_batch(args, make_rows(), dp_size=2, cp_size=1)[rank]
    flags = {**BUDGET, "bf16": args.precision == "bf16"}
    base = start_actor(Case(model=case.model, flags=flags).args(), rank, 2)
    expected = base.log_probs(mine, "actor")
    same_as_base = [
        all(map(np.array_equal, actor.log_probs(mine, model), expected))
        for model in ("actor", "ref")
    ]
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        actor.train(0, split_batch(args, make_rows(), dp_size=2, cp_size=1)[rank])
    return {
        "same_as_base": same_as_base,
        "saved": {tuple(sorted(shape)) for shape in saved},
        "ref_after": all(map(np.array_equal, actor.log_probs(mine, "ref"), expected)),
        "actor_after": all(map(np.array_equal, actor.log_probs(mine, "actor"), expected)),
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_new_adapter_changes_no_bit_and_no_dequantized_weight_is_kept(family, bf16, folders):
    targets = {"qwen3": ["all-linear"], "qwen3_moe": ["all-linear", "experts"]}[family]
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "lora_target_modules": targets}
    case = Case(model=str(folders[family][0]), flags={**flags, **KL, **BUDGET, "bf16": bf16})
    held = load_file(folders[family][0] / "model.safetensors")
    shapes = [t.shape for t in held.values() if t.dtype == torch.float8_e4m3fn]
    packed = {tuple(sorted((s[0], s[1] // (2 if bf16 else 4)))) for s in shapes}
    matrices = {tuple(sorted(shape)) for shape in shapes} - packed
    assert len(matrices) >= 2
    if family == "qwen3_moe":
        matrices |= {(4, 160, 288), (4, 144, 160)}  # of all experts
    for found in run_fsdp_ranks(_start_fresh, 2, case):
        assert found["same_as_base"] == [True, True]
        assert found["ref_after"] and not found["actor_after"]
        assert found["saved"] and not found["saved"] & matrices


# ---- checkpoints


def _resume(rank: int, case: Case, other: Case, wide: Case, path: str) -> dict[str, Any]:
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
    both = []
    for actor in (first, second):
        actor.train(1, rows(1))
        both.append(whole_weights(actor))
    with pytest.raises(UserError) as refused:
        start_actor(other.args(), rank, 2, checkpoint=path)
    on_wide = start_actor(wide.args(), rank, 2, checkpoint=path)
    return {
        "same": all(same(tensor, both[1][name]) for name, tensor in both[0].items()),
        "refused": str(refused.value),
        "loaded_on_wide": {n for n in whole_weights(on_wide) if ".lora_" in n},
        "adapters": {n for n in both[0] if ".lora_" in n},
    }


def test_a_checkpoint_resumes_on_the_same_fp8_weights(folders, tmp_path):
    """On the same base in another precision, whose values cannot be compared, it is taken as it is."""
    plain = make_tiny_checkpoint(tmp_path / "plain", seed=5, weight_scale=3.0, **SIZES)
    convert_to_fp8(plain, tmp_path / "other", Fp8Format(strategy="block", block=BLOCK))
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, **BUDGET}
    case, other, wide = (
        Case(model=str(model), flags=flags)
        for model in (folders["qwen3"][0], tmp_path / "other", folders["qwen3"][1])
    )
    path = str(tmp_path / "checkpoint")
    for found in run_fsdp_ranks(_resume, 2, case, other, wide, path):
        assert found["same"] and found["loaded_on_wide"] == found["adapters"]
        assert "holds adapters of another base" in found["refused"]
    assert json.loads((Path(path) / "trainer.json").read_text())["base"]["dtype"].startswith("FP8")


def _load(rank: int, case: Case) -> str:
    with pytest.raises(UserError) as refused:
        start_actor(case.args(), rank, 1)
    return str(refused.value)


def test_files_that_lack_a_tensor_are_refused(folders, tmp_path):
    broken = shutil.copytree(folders["qwen3"][0], tmp_path / "broken")
    (broken / "model.safetensors.index.json").unlink()
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, words in (
        ({"model.norm.weight": None}, "model.norm.weight should have shape (160,), it has no such"),
        ({name + "_scale_inv": torch.ones(2, 2)}, "_scale_inv should have shape (3, 2), it has"),
        ({name + "_scale_inv": None}, f"{name} is in FP8 and has no {name}_scale_inv"),
    ):
        changed = {n: t for n, t in {**weights, **change}.items() if t is not None}
        save_file(changed, broken / "model.safetensors", metadata={"format": "pt"})
        case = Case(model=str(broken), flags={"lora_rank": 4, "lora_merge_for_rollout": True})
        assert words in run_fsdp_ranks(_load, 1, case)[0]
