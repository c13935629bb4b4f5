"""Training through the real SGLang, by every transport, and how far its log-probs are from the trainer's."""

from __future__ import annotations

import pytest

from tests.e2e import runs
from tests.engines import TOKEN
from tests.tiny import make_tiny_checkpoint
from tests.tiny_vision import make_vision_checkpoint, write_image_rows

pytestmark = pytest.mark.timeout(1800)  # a start of a server takes minutes on busy cores


def check(run_dir, rollouts: int) -> None:
    trained = runs.metrics(run_dir, "train")
    assert [record["rollout_id"] for record in trained] == list(range(rollouts))
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    generated = runs.metrics(run_dir, "rollout")
    assert all(record["rollout/samples"] == 16 for record in generated)
    versions = [record["perf/weight_version"] for record in runs.metrics(run_dir, "perf")]
    assert versions == [number + 2 for number in range(rollouts)]


FSDP = {"train_backend": "fsdp"}
MEGATRON_TP2 = {
    "train_backend": "megatron",
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "actor_num_gpus_per_node": 2,
}


@pytest.mark.parametrize(
    ("trainer", "transport", "temperature"),
    [
        (FSDP, "disk", 0.7),
        (FSDP, "distributed", 1.0),
        (MEGATRON_TP2, "disk", 1.0),
        (MEGATRON_TP2, "distributed", 0.7),
    ],
    ids=["fsdp-disk", "fsdp-distributed", "megatron-disk", "megatron-distributed"],
)
def test_with_a_server_somebody_else_runs(
    model, data, server, tmp_path, monkeypatch, trainer, transport, temperature
):
    if trainer is MEGATRON_TP2:
        pytest.importorskip("megatron.core")
    monkeypatch.setenv("SLIME_ENGINE_TOKEN", TOKEN)
    words = runs.command(
        model,
        data,
        tmp_path / "run",
        rollout_num_gpus=None,
        rollout_external=True,
        rollout_external_engine_addrs=[server.url],
        update_weight_transport=transport,
        rollout_temperature=temperature,
        **trainer,
    )
    status, output = runs.run(words, timeout=600)
    assert status == 0, output
    assert f"sglang engine at {server.url}" in output
    check(tmp_path / "run", 3)


def test_colocated_with_a_server_of_its_own(model, data, tmp_path):
    words = runs.command(
        model,
        data,
        tmp_path / "run",
        rollout_engine="sglang",
        num_rollout=2,
        colocate=True,
        rollout_num_gpus=None,
    )
    status, output = runs.run(words, timeout=900)
    assert status == 0, output
    check(tmp_path / "run", 2)


def test_training_repeats_the_experts_that_two_ranks_of_sglang_chose(data, tmp_path):
    """SGLang tells them with each response; both sides then agree on every log-prob."""
    pytest.importorskip("megatron.core")
    model = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", weight_scale=3.0)
    words = runs.command(
        model,
        data,
        tmp_path / "run",
        rollout_engine="sglang",
        train_backend="megatron",
        use_rollout_routing_replay=True,
        num_rollout=2,
        rollout_num_gpus=2,
        rollout_num_gpus_per_engine=2,
    )
    status, output = runs.run(words, timeout=900)
    assert status == 0, output
    check(tmp_path / "run", 2)


def test_prompts_with_images_and_a_trained_tower(tmp_path):
    """SGLang's log-probs are the trainer's, and its checksums those of what was sent, tower included."""
    model = make_vision_checkpoint(tmp_path / "model")
    words = runs.command(
        model,
        write_image_rows(tmp_path / "data"),
        tmp_path / "run",
        rollout_engine="sglang",
        num_rollout=2,
        multimodal_keys='{"image": "images"}',
        apply_chat_template=True,
        no_freeze_vision_tower=True,
    )
    status, output = runs.run(words, timeout=900)
    assert status == 0, output
    check(tmp_path / "run", 2)


def test_a_model_with_gated_delta_nets(data, tmp_path, monkeypatch):
    """Its delta rule is the stand-in of tools/sglang_cpu; states, prefixes and updates are SGLang's."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")  # SGLang keeps bf16 windows otherwise
    model = make_tiny_checkpoint(
        tmp_path / "model", "qwen3_next", weight_scale=2.0, full_attention_interval=2
    )
    words = runs.command(model, data, tmp_path / "run", rollout_engine="sglang", num_rollout=2)
    status, output = runs.run(words, timeout=900)
    assert status == 0, output
    check(tmp_path / "run", 2)
