"""Engines that are lost in the middle of an update, and all engines lost at once."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.e2e import gates, runs
from tests.tiny import make_tiny_checkpoint

DISTRIBUTED = {
    "num_rollout": 4,
    "rollout_num_gpus": 2,
    "update_weight_transport": "distributed",
    "update_weight_buffer_size": 8192,  # several buckets
    "rollout_data_postprocess_path": gates.UPDATE,
}


def trained(run_dir: Path) -> list[int]:
    return [record["rollout_id"] for record in runs.metrics(run_dir, "train")]


def lose_one_in_an_update(words, run_dir, number: signal.Signals) -> None:
    """Send the signal to engine 0 in an update; the run replaces it and goes on."""
    process, gate = runs.start(words), gates.Gate(run_dir)
    gate.wait(process)
    other = runs.engine_facts(run_dir, 1)
    victim = psutil.Process(runs.engine_facts(run_dir, 0)["pid"])
    victim.send_signal(number)
    gate.open()
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert output.count("engine 0 failed and was started again") == 1
    assert "engine 1 failed" not in output
    assert runs.engine_facts(run_dir, 1) == other
    assert trained(run_dir) == list(range(4))
    records = runs.metrics(run_dir, "train")
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in records), records
    runs.wait_until_gone(victim)


def test_an_engine_lost_in_a_broadcast_is_replaced_and_the_other_runs_on(
    tiny_model, tiny_data, tmp_path
):
    run_dir = tmp_path / "run"
    words = runs.command(tiny_model, tiny_data, run_dir, **DISTRIBUTED)
    lose_one_in_an_update(words, run_dir, signal.SIGKILL)


def test_an_engine_frozen_in_an_update_is_replaced_and_the_other_runs_on(
    tiny_model, tiny_data, tmp_path
):
    """Well before the ten minutes that a broadcast may take."""
    run_dir = tmp_path / "run"
    checks = {"rollout_health_check_interval": 1, "rollout_health_check_timeout": 10}
    words = runs.command(tiny_model, tiny_data, run_dir, **DISTRIBUTED, **checks)
    lose_one_in_an_update(words, run_dir, signal.SIGSTOP)


def test_with_every_engine_dead_the_run_waits_then_saves_and_ends(tiny_data, tmp_path):
    """They cannot come back: the weights they start from are gone. Once those are there again, the run
    goes on from where it stopped."""
    model = make_tiny_checkpoint(tmp_path / "model", weight_scale=2.0)
    run_dir = tmp_path / "run"
    words = runs.command(
        model,
        tiny_data,
        run_dir,
        num_rollout=4,
        rollout_num_gpus=2,
        rollout_health_check_interval=1,
        rollout_no_engine_timeout=15,  # within which the run finds out that they are dead
        save=tmp_path / "checkpoints",
        custom_generate_function_path=gates.GENERATE,
    )
    process, gate = runs.start(words), gates.Gate(run_dir)
    gate.wait(process)
    weights, hidden = model / "model.safetensors", tmp_path / "hidden"
    weights.rename(hidden)
    for engine in (0, 1):
        psutil.Process(runs.engine_facts(run_dir, engine)["pid"]).kill()
    gate.open()
    output = runs.finish(process)
    assert process.returncode == 1, output
    assert "could not be started again so far" in output
    assert "no engine is left, so generation waits" in output
    assert "there was no engine to generate with for 15 s" in output
    assert "Traceback" not in output
    assert trained(run_dir) == list(range(gates.HELD))
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == gates.HELD - 1
    hidden.rename(weights)
    status, output = runs.run([*words, "--load", str(tmp_path / "checkpoints")])
    assert status == 0, output
    assert trained(run_dir) == list(range(4))
