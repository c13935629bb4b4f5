"""Runs with the flags that published scripts have, at tiny size: GRPO on Megatron, SFT without engines."""

from __future__ import annotations

import json

import pytest

from tests.e2e import runs
from tests.e2e.test_sft import conversation
from tests.tiny import make_tiny_checkpoint
from tests.unit.test_loss_mask import CHATML, tokenizer_with

SFT = "slime.rollout.sft_rollout.generate_rollout"


def test_grpo_as_the_launchers_write_it(tiny_model, tiny_data, tmp_path):
    pytest.importorskip("megatron.core")
    flags = {
        "train_backend": "megatron",
        "spec": ["slime_plugins.models.qwen3", "get_qwen3_spec"],
        "sequence_parallel": True,
        "data_pad_size_multiplier": 16,
        "log_probs_chunk_size": -1,
        "update_weight_transport": "nccl",
        "rollout_data_transport": "ray",
        "ref_micro_batch_size": 1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "ci_test": True,
        "ci_save_grad_norm": tmp_path / "norms.json",
        "dump_details": tmp_path / "details",
        "eval_interval": 2,
        "eval_prompt_data": tiny_data,
        "eval_min_new_tokens": 2,
        "num_epoch": 1,
        "num_rollout": 2,
    }
    status, output = runs.run(runs.command(tiny_model, tiny_data, tmp_path / "run", **flags))
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    norms = json.loads((tmp_path / "norms.json").read_text())
    assert (
        norms == {str(r["rollout_id"]): r["train/grad_norm"] for r in trained} and len(norms) == 2
    )
    assert {p.name for p in (tmp_path / "details" / "rollout_data").iterdir()} == {"0.pt", "1.pt"}
    assert {p.name for p in (tmp_path / "details" / "train_data").iterdir()} == {"0_0.pt", "1_0.pt"}
    evaluated = runs.metrics(tmp_path / "run", "eval")
    assert f"eval/{tiny_data.stem}/reward" in evaluated[0]


def test_sft_as_the_scripts_write_it(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", vocab_size=328)
    tokenizer_with(CHATML).save_pretrained(model)
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": conversation(n)}) + "\n" for n in range(8)))
    flags = {
        "rollout_function_path": SFT,
        "loss_type": "sft_loss",
        "debug_train_only": True,
        "disable_compute_advantages_and_returns": True,
        "input_key": "messages",
        "label_key": None,
        "custom_rm_path": None,
        "n_samples_per_prompt": 1,
        "global_batch_size": 4,
        "num_rollout": 2,
        "max_tokens_per_gpu": 512,
        "rollout_num_gpus": None,
    }
    status, output = runs.run(runs.command(model, data, tmp_path / "run", **flags))
    assert status == 0, output
    losses = [record["train/loss"] for record in runs.metrics(tmp_path / "run", "train")]
    assert len(losses) == 2 and not list((tmp_path / "run" / "logs").glob("engine_*"))
