"""Whole runs with a critic: colocated or apart they learn the same, and a killed one continues bitwise."""

import os
import signal

import pytest

from tests.e2e import gates, runs

PPO = {
    "advantage_estimator": "ppo",
    "sglang_enable_deterministic_inference": True,
    "num_rollout": 4,
    "num_critic_only_steps": 1,
    "critic_lr": 2e-3,
    "save_interval": 1,
}


@pytest.fixture(scope="module")
def apart(tiny_model, tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart")
    words = runs.command(tiny_model, tiny_data, folder / "run", save=folder / "saved", **PPO)
    status, output = runs.run(words)
    assert status == 0, output
    return folder


def test_the_critic_learns_alone_first_and_the_engine_agrees(apart):
    trained = runs.metrics(apart / "run", "train")
    assert len(trained) == 4
    assert all(record["train/critic_grad_norm"] > 0 for record in trained)
    assert [("train/loss" in record) for record in trained] == [False, True, True, True]
    # A value head of zeros: the first critic predicts 0 everywhere.
    assert trained[0]["train/critic_value"] == 0.0
    assert trained[0]["train/critic_lr"] == 2e-3
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained[1:])
    assert (apart / "saved" / "iter_0000003" / "critic" / "trainer.json").exists()


def test_colocated_in_turns_and_resumed_it_is_the_same_run(apart, tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        **{
            **PPO,
            "colocate": True,
            "rollout_num_gpus": None,
            "save": tmp_path / "actor",
            "load": tmp_path / "actor",
            "critic_save": tmp_path / "critic",
            "save_total_limit": 1,
            "custom_generate_function_path": gates.GENERATE,
        },
    )
    process, gate = runs.start(words), gates.Gate(tmp_path / "run")
    gate.wait(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    gate.open()
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == runs.learning(apart / "run")
    assert [p.name for p in (tmp_path / "critic").glob("iter_*")] == ["iter_0000003"]
