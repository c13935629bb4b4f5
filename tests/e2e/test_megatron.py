"""Whole runs of the Megatron trainer: apart or colocated they learn the same, a killed one continues."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.e2e import gates, runs
from tests.parity.mtp_models import make_mtp_model
from tests.tiny import make_tiny_checkpoint

pytest.importorskip("megatron.core")

TP2 = {
    "train_backend": "megatron",
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "actor_num_gpus_per_node": 2,
    "sglang_enable_deterministic_inference": True,
    "num_rollout": 4,
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "save_interval": 1,
    "save_total_limit": 2,
}


@pytest.fixture(scope="module")
def apart(tiny_model, tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart")
    words = runs.command(tiny_model, tiny_data, folder / "run", save=folder / "saved", **TP2)
    status, output = runs.run(words)
    assert status == 0, output
    return folder


def test_the_engine_serves_what_was_trained(apart):
    trained = runs.metrics(apart / "run", "train")
    assert len(trained) == 4
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained)
    assert all(record["train/grad_norm"] > 0 for record in trained)
    assert (apart / "saved" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


def test_colocated_and_killed_it_is_the_same_run(apart, tiny_model, tiny_data, tmp_path):
    saved = tmp_path / "saved"
    words = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        **{
            **TP2,
            "colocate": True,
            "rollout_num_gpus": None,
            "save": saved,
            "load": saved,
            "rollout_data_postprocess_path": gates.TRAIN,
            "custom_megatron_init_path": "tests.e2e.rewards.note_released_memory",
        },
    )
    process, gate = runs.start(words), gates.Gate(tmp_path / "run")
    gate.wait(process)
    # the engine sized its KV cache and gave it back before the trainer took memory
    assert json.loads((tmp_path / "run" / "released.json").read_text()) == ["kv_cache", "weights"]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    gate.open()
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == runs.learning(apart / "run")


def test_a_checkpoint_of_another_layout_is_continued(apart, tiny_model, tiny_data, tmp_path):
    """From TP2 to PP2, through the same folder of checkpoints."""
    other = {
        **TP2,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": 2,
        "load": apart / "saved",
        "save": tmp_path / "saved",
        "num_rollout": 5,
    }
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", **other)
    status, output = runs.run(words)
    assert status == 0, output
    (trained,) = runs.metrics(tmp_path / "run", "train")
    assert trained["rollout_id"] == 4
    assert trained["train/log_prob_gap_max"] < 1e-4


def test_a_converted_model_is_where_a_run_starts(tiny_model, tiny_data, tmp_path):
    """Another model than --hf-checkpoint's, which is the reference: they differ from the first step on."""
    other = make_tiny_checkpoint(tmp_path / "other", seed=1, weight_scale=2.0)
    convert = [sys.executable, runs.ROOT / "tools" / "convert_hf_to_torch_dist.py"]
    converted = tmp_path / "torch_dist"
    flags = [f"--hf-checkpoint={other}", f"--save={converted}"]
    done = subprocess.run([*convert, *flags], cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    flags = {**TP2, "kl_loss_type": "low_var_kl", "num_rollout": 2}
    flags |= {"load": converted, "save": tmp_path / "saved"}
    status, output = runs.run(runs.command(tiny_model, tiny_data, tmp_path / "run", **flags))
    assert status == 0, output
    first, second = runs.metrics(tmp_path / "run", "train")
    assert (first["rollout_id"], second["rollout_id"]) == (0, 1)
    assert first["train/log_prob_gap_max"] < 1e-4
    assert first["train/kl_loss"] > 1e-4  # never negative, and 0 for equal models
    assert (tmp_path / "saved" / "iter_0000001").is_dir()


def test_training_repeats_the_engines_experts(tiny_data, tmp_path):
    """The engine tells them, the samples carry them, and both sides then agree on every log-prob."""
    model = make_tiny_checkpoint(tmp_path / "m", "qwen3_moe", weight_scale=3.0)
    flags = {"train_backend": "megatron", "use_rollout_routing_replay": True, "num_rollout": 2}
    status, output = runs.run(runs.command(model, tiny_data, tmp_path / "run", **flags))
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 2
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained)


def test_mtp_layers_learn_beside_the_policy(tiny_model, tiny_data, tmp_path):
    """Every update is proven by checksums: the engine, which has no such layers, is sent the rest."""
    model = make_mtp_model(tmp_path / "m", "glm4_moe")
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, model)
    flags = {
        "train_backend": "megatron",
        "pipeline_model_parallel_size": 2,
        "actor_num_gpus_per_node": 2,
        "mtp_num_layers": 1,
        "enable_mtp_training": True,
        "num_rollout": 4,
        "save": tmp_path / "saved",
        "save_interval": 4,
    }
    status, output = runs.run(runs.command(model, tiny_data, tmp_path / "run", **flags))
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    losses = [record["train/mtp_loss"] for record in trained]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1, losses
    assert all(record["train/log_prob_gap_max"] < 1e-3 for record in trained)
