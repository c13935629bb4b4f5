"""A whole run with LoRA: engines sample from what the adapters make of the base, and it resumes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.runlog.export_folder import export_info
from tests.e2e import runs
from tests.e2e.test_engines_lost import DISTRIBUTED, lose_one_in_an_update

LORA = {"lora_rank": 4, "lora_alpha": 32}
FLAGS = {
    **LORA,
    "sglang_enable_deterministic_inference": True,
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "num_rollout": 3,
    "lr": 0.01,
}


def test_adapters_sent_alone_teach_the_same_as_merged_weights(
    unbroken, tiny_model, tiny_data, tmp_path
):
    """The first rollouts are equal; later ones are sampled from numbers rounded in another order."""
    flags = {**FLAGS, "save_hf": tmp_path / "adapter"}
    status, output = runs.run(runs.command(tiny_model, tiny_data, tmp_path / "run", **flags))
    assert status == 0, output
    alone, merged = (runs.metrics(folder / "run", "train") for folder in (tmp_path, unbroken))
    assert len(alone) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in alone), alone
    for name in ("train/loss", "train/grad_norm"):
        assert alone[0][name] == pytest.approx(merged[0][name], rel=1e-4, abs=1e-6)
    sent = runs.metrics(tmp_path / "run", "perf") or alone
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    nbytes = sum(tensor.nbytes for tensor in saved.values())
    found = {r["perf/update_weights_bytes"] for r in sent if "perf/update_weights_bytes" in r}
    assert found == {nbytes}, found


MEGATRON = {
    "train_backend": "megatron",
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}


@pytest.mark.parametrize("trainer", [{}, MEGATRON], ids=["fsdp", "megatron"])
def test_two_ranks_teach_two_engines_with_adapters_alone(trainer, tiny_model, tiny_data, tmp_path):
    layout = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, **trainer}
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", **{**FLAGS, **layout})
    status, output = runs.run(words)
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained


def test_a_colocated_engine_keeps_the_base_while_its_memory_is_released(
    tiny_model, tiny_data, tmp_path
):
    words = runs.command(
        *(tiny_model, tiny_data, tmp_path / "run"),
        **{**FLAGS, "colocate": True, "rollout_num_gpus": None},
    )
    status, output = runs.run(words)
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained


def test_an_engine_lost_in_an_update_gets_base_and_adapter_again(tiny_model, tiny_data, tmp_path):
    flags = {**LORA, "lr": 0.01, **DISTRIBUTED}
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", **flags)
    lose_one_in_an_update(words, tmp_path / "run", signal.SIGKILL)


@pytest.fixture(scope="module")
def unbroken(tiny_model, tiny_data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    merge = {"lora_merge_for_rollout": True}
    written = {
        **merge,
        "save": folder / "checkpoints",
        "save_interval": 1,
        "save_hf": folder / "adapter",
    }
    words = runs.command(tiny_model, tiny_data, folder / "run", **FLAGS, **written)
    status, output = runs.run(words)
    assert status == 0, output
    return folder


def test_engines_sample_from_the_merged_weights(unbroken):
    trained = runs.metrics(unbroken / "run", "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    kl = [record["train/kl_loss"] for record in trained]
    assert kl[0] == 0 and kl[2] > 0  # a new adapter is the base, which is the reference


def test_the_export_is_an_adapter_that_peft_loads(unbroken, tiny_model):
    info = export_info(unbroken / "adapter")
    assert info is not None and info.rollout_id == 2
    config = json.loads((unbroken / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = PeftModel.from_pretrained(base, unbroken / "adapter")
    held = {name: p for name, p in model.named_parameters() if "lora_" in name}
    saved = load_file(unbroken / "adapter" / "adapter_model.safetensors")
    assert len(held) == len(saved) == 2 * 2 * 7  # A and B of seven modules in two layers
    for name, tensor in saved.items():
        assert torch.equal(held[name.replace(".weight", ".default.weight")], tensor)
        assert tensor.any()


def test_a_resumed_run_learns_the_same_bit_by_bit(unbroken, tiny_model, tiny_data, tmp_path):
    flags = {**FLAGS, "load": unbroken / "checkpoints", "ckpt_step": 1}
    flags["lora_merge_for_rollout"] = True
    status, output = runs.run(runs.command(tiny_model, tiny_data, tmp_path / "run", **flags))
    assert status == 0, output
    resumed, whole = runs.learning(tmp_path / "run"), runs.learning(unbroken / "run")
    assert {key[0] for key in resumed} == {2}
    assert resumed == {key: value for key, value in whole.items() if key[0] == 2}


def test_another_rank_is_refused_before_anything_starts(unbroken, tiny_model, tiny_data, tmp_path):
    flags = {**FLAGS, "load": unbroken / "checkpoints", "lora_rank": 8}
    status, output = runs.run(runs.command(tiny_model, tiny_data, tmp_path / "run", **flags))
    assert status != 0
    assert "was saved with --lora-rank 4, this run has 8: use --lora-rank 4" in output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
