"""Options of the FSDP trainer, each compared with the plain setting or with its definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.core.errors import ConfigError, UserError
from slime.rollout.train_data import split_batch
from tests.fsdp import (
    Case,
    make_rows,
    naive_log_probs,
    start_actor,
    train_fsdp,
    whole_weights,
)
from tests.ranks import run_ranks
from tests.tiny import make_tiny_checkpoint

RANKS = 2
DENSE, MOE, SLIDING = "dense", "moe", "sliding"


# ---- hooks, named by import path in the settings below


def sft_from_logits(args, batch, logits, sum_of_sample_mean):
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    token_losses = -log_probs.gather(1, batch.labels[:, None]).squeeze(1)
    return sum_of_sample_mean(token_losses), {"tokens": batch.loss_mask.sum()}


def mean_over_sample(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(flat: torch.Tensor) -> torch.Tensor:
        rows = zip(flat.split(response_lengths), loss_masks, strict=True)
        return sum((row * mask).sum() / mask.sum().clamp(min=1) for row, mask in rows)

    return reduce


def double_first_sample(
    *,
    args,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
):
    assert [len(row) for row in train_log_probs] == response_lengths
    return (
        pg_loss * 2,
        loss_masks,
        {"gap": torch.cat(train_log_probs) - torch.cat(rollout_log_probs)},
    )


def negated_rewards(args, rollout_data):
    pairs = zip(rollout_data.rewards, rollout_data.loss_masks, strict=True)
    rollout_data.advantages = [-reward * mask.astype("float32") for reward, mask in pairs]


def negate_again(args, rollout_id, rollout_data):
    assert rollout_data.old_log_probs is not None
    rollout_data.advantages = [-row for row in rollout_data.advantages]


HERE = "tests.integration.test_fsdp_features"
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (DENSE, {}),
    "offload": (DENSE, {"fsdp_cpu_offload": True}),
    "sdpa": (DENSE, {"attn_implementation": "sdpa"}),
    "eager": (DENSE, {"attn_implementation": "eager"}),
    "sliding": (SLIDING, {}),
    "sliding_sdpa": (SLIDING, {"attn_implementation": "sdpa"}),
    "moe": (MOE, {}),
    "bf16": (DENSE, {"bf16": True}),
    "sft": (DENSE, {"loss_type": "sft_loss"}),
    "custom_loss": (
        DENSE,
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.sft_from_logits"},
    ),
    "reducer": (DENSE, {"custom_pg_loss_reducer_function_path": f"{HERE}.mean_over_sample"}),
    "custom_tis": (
        DENSE,
        {"use_tis": True, "custom_tis_function_path": f"{HERE}.double_first_sample"},
    ),
    "negated": (DENSE, {"custom_advantage_function_path": f"{HERE}.negated_rewards"}),
    "negated_twice": (
        DENSE,
        {
            "custom_advantage_function_path": f"{HERE}.negated_rewards",
            "rollout_data_postprocess_path": f"{HERE}.negate_again",
        },
    ),
    "frozen": (DENSE, {"freeze_params_name_list": ["embed", r"layers\.1\."]}),
    "only": (DENSE, {"only_train_params_name_list": [r"q_proj", "norm"]}),
    "rollout_logprobs": (DENSE, {"use_rollout_logprobs": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    sliding = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    made = {
        DENSE: make_tiny_checkpoint(folder / DENSE, weight_scale=3.0),
        MOE: make_tiny_checkpoint(folder / MOE, "qwen3_moe", weight_scale=3.0),
        SLIDING: make_tiny_checkpoint(folder / SLIDING, weight_scale=3.0, **sliding),
    }
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(scope="module")
def run(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Some virtual machines announce AMX and then stop a bf16 product that uses it (SIGILL).
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        return run_ranks(_run_all, RANKS, models, str(tmp_path_factory.mktemp("out")))[0]


def _case(models: dict[str, str], name: str) -> Case:
    model, flags = SETTINGS[name]
    return Case(model=models[model], flags={"micro_batch_size": 3, **flags})


def _run_all(rank: int, models: dict[str, str], folder: str) -> dict[str, Any]:
    outcomes = {name: train_fsdp(_case(models, name), rank, RANKS) for name in SETTINGS}
    return {
        **outcomes,
        "exports": {name: _export(rank, models[name], f"{folder}/{name}") for name in (DENSE, MOE)},
        "not_finite": _train_on_nan(rank, models[DENSE]),
    }


def _export(rank: int, model: str, folder: str) -> dict[str, Any]:
    """Two trained rollouts, then every way the weights leave the trainer."""
    case = Case(model=model, flags={"update_weight_buffer_size": 20_000, "micro_batch_size": 4})
    args = case.args()
    actor = start_actor(args, rank, RANKS)
    for rollout_id in range(2):
        parts = split_batch(args, make_rows(rollout_id), dp_size=RANKS, cp_size=1)
        actor.train(rollout_id, parts[rank])
    buckets = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in actor.hf_buckets()]
    actor.sleep()
    actor.wake_up()
    actor.export_hf(folder)
    return {
        "folder": folder,
        "buckets": buckets,
        "weights": whole_weights(actor),
        "experts": actor.model.module.hf.config._experts_implementation,
    }


def _train_on_nan(rank: int, model: str) -> dict[str, Any]:
    case = Case(model=model, steps=2)
    args = case.args()
    actor = start_actor(args, rank, RANKS)
    before = whole_weights(actor)
    rows = make_rows()
    rows.rewards[0] = float("nan")
    part = split_batch(args, rows, dp_size=RANKS, cp_size=1)[rank]
    try:
        actor.train(5, part)
    except UserError as error:
        after = whole_weights(actor)
        return {
            "message": str(error),
            "unchanged": all(torch.equal(after[name], weight) for name, weight in before.items()),
        }
    return {"message": "none", "unchanged": False}


def _assert_same_gradient(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tol=2e-5
):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = grad.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(found[name] / scale, grad / scale, rtol=0, atol=tol, msg=name)


@pytest.mark.parametrize(
    ("setting", "same_as"),
    [
        ("offload", "plain"),
        ("sdpa", "plain"),
        ("eager", "plain"),
        ("sliding", "sliding_sdpa"),
        ("custom_loss", "sft"),
        ("negated_twice", "plain"),
    ],
)
def test_two_ways_to_the_same_gradient(run, setting, same_as):
    _assert_same_gradient(run[setting].grads, run[same_as].grads)


def test_a_sliding_window_matters(run):
    ours, full = run["sliding"].grads, run["plain"].grads
    assert any((ours[name] - full[name]).abs().max() > 1e-4 for name in full)


def test_custom_advantages_and_correction_reach_the_loss(run):
    plain = run["plain"].grads
    _assert_same_gradient(run["negated"].grads, {name: -grad for name, grad in plain.items()})
    _assert_same_gradient(run["custom_tis"].grads, {name: 2 * grad for name, grad in plain.items()})
    assert run["custom_tis"].metrics[0]["train/gap"] != 0


def test_custom_reducer_replaces_the_sum_over_samples(run, models):
    """One mean per row, over the eight trajectories of a step: equal to the naive loop with groups of one."""
    plain, reduced = run["plain"], run["reducer"]
    assert plain.metrics[0]["train/pg_loss"] != pytest.approx(reduced.metrics[0]["train/pg_loss"])
    rows = make_rows()
    expected = sum(-rows.rewards[i] * bool(rows.loss_masks[i].any()) for i in range(len(rows))) / 8
    total_weight = sum(1 for i in set(rows.trajectory_ids) if _trained(rows, i)) / 8
    assert reduced.metrics[0]["train/pg_loss"] == pytest.approx(expected / total_weight, rel=1e-4)


def _trained(rows, execution: int) -> bool:
    return any(
        mask.any()
        for mask, i in zip(rows.loss_masks, rows.trajectory_ids, strict=True)
        if i == execution
    )


def test_bf16_keeps_fp32_weights_and_comes_close(run):
    assert all(weight.dtype == torch.float32 for weight in run["bf16"].weights.values())
    for ours, plain in zip(run["bf16"].metrics, run["plain"].metrics, strict=True):
        assert ours["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=0.05)
        assert ours["train/grad_norm"] != plain["train/grad_norm"]


@pytest.mark.parametrize(
    ("setting", "trained"),
    [
        ("frozen", lambda name: "embed" not in name and "layers.1." not in name),
        ("only", lambda name: "q_proj" in name or "norm" in name),
    ],
)
def test_only_the_chosen_parameters_move(run, models, setting, trained):
    start = dict(AutoModelForCausalLM.from_pretrained(models[DENSE]).named_parameters())
    for name, weight in run[setting].weights.items():
        assert torch.equal(weight, start[name]) != trained(name), name


@pytest.mark.parametrize("setting", ["plain", "rollout_logprobs", "negated_twice"])
def test_gap_to_the_engine_is_reported_with_and_without_a_pass_of_its_own(run, models, setting):
    rows = make_rows()
    args = _case(models, setting).args()
    model = AutoModelForCausalLM.from_pretrained(models[DENSE])
    gaps = []
    for i in range(len(rows)):
        with torch.no_grad():
            log_probs, _ = naive_log_probs(model, rows, i, args)
        mask = torch.tensor(rows.loss_masks[i]) > 0
        gaps.append((log_probs - torch.tensor(rows.rollout_log_probs[i])).abs()[mask])
    gap = torch.cat(gaps)
    metrics = run[setting].metrics[0]
    assert metrics["train/log_prob_gap_max"] == pytest.approx(gap.max().item(), abs=1e-4)
    assert metrics["train/log_prob_gap_mean"] == pytest.approx(gap.mean().item(), abs=1e-4)


@pytest.mark.parametrize("model", [DENSE, MOE])
def test_buckets_carry_every_tensor_of_the_checkpoint_once_within_their_size(run, models, model):
    buckets = run["exports"][model]["buckets"]
    named = [item for bucket in buckets for item in bucket]
    with safe_open(Path(models[model], "model.safetensors"), "pt") as file:
        assert sorted(name for name, _ in named) == sorted(file.keys())
        assert all(list(tensor.shape) == file.get_slice(n).get_shape() for n, tensor in named)
    assert len(buckets) > 3
    for bucket in buckets:
        assert sum(tensor.nbytes for _, tensor in bucket) <= 20_000 or len(bucket) == 1


@pytest.mark.parametrize("model", [DENSE, MOE])
def test_exported_folder_is_the_trained_model(run, models, model):
    export = run["exports"][model]
    exported, info = AutoModelForCausalLM.from_pretrained(
        export["folder"], output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = dict(exported.named_parameters())
    assert weights.keys() == export["weights"].keys()
    start = dict(AutoModelForCausalLM.from_pretrained(models[model]).named_parameters())
    for name, weight in export["weights"].items():
        assert torch.equal(weights[name], weight), name
        assert not torch.equal(start[name], weight), name
    assert AutoTokenizer.from_pretrained(export["folder"]).encode("1+1=") != []
    assert json.loads(Path(export["folder"], "config.json").read_text())["dtype"] == "float32"


def test_experts_are_not_looped_over_in_python(run):
    """That the grouped products have the loop's gradient is part of the comparison with the naive loop."""
    assert run["exports"][MOE]["experts"] == "grouped_mm"


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_touched(run):
    assert "rollout 5, step 0: the gradient is not finite" in run["not_finite"]["message"]
    assert run["not_finite"]["unchanged"]


def test_an_attention_that_would_mix_samples_is_refused(models):
    with pytest.raises(ConfigError, match=r"--attn-implementation.*sdpa"):
        Case(model=models[DENSE], flags={"attn_implementation": "paged|sdpa"}).args()
    from slime.backends.fsdp_utils.model import choose_attention

    with pytest.raises(UserError, match="keep packed samples apart"):
        choose_attention("paged|sdpa")
