"""Engines that are lost in an update, before memory is released, while trained on; all at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e import engine_faults, gates, runs
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


@pytest.mark.parametrize("hook", [engine_faults.KILL, engine_faults.FREEZE])
def test_a_colocated_engine_lost_before_its_memory_is_released_is_replaced(
    tiny_model, tiny_data, tmp_path, hook
):
    """Two engines: the one that works gives its memory away and goes on."""
    run_dir = tmp_path / "run"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        colocate=True,
        actor_num_gpus_per_node=2,
        rollout_num_gpus=None,
        custom_rollout_log_function_path=hook,
        rollout_health_check_timeout=5,
    )
    status, output = runs.run(words)
    assert status == 0, output
    assert output.count("engine 0 failed and was started again") == 1
    assert "engine 1 failed" not in output
    assert trained(run_dir) == list(range(3))
    gaps = [record["train/log_prob_gap_max"] for record in runs.metrics(run_dir, "train")]
    assert all(gap < 1e-4 for gap in gaps), gaps


def test_tokens_of_a_replaced_engine_carry_the_version_of_the_weights_that_made_them(
    tiny_model, tiny_data, tmp_path
):
    """The engine dies in rollout 2, when rollout 1 was trained on but not sent to the engines yet."""
    run_dir, exports = tmp_path / "run", tmp_path / "hf"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=4,
        rollout_num_gpus=2,
        rollout_health_check_interval=1,
        sglang_enable_deterministic_inference=True,
        custom_generate_function_path=gates.GENERATE,
        save=tmp_path / "checkpoints",
        save_interval=1,
        save_hf=exports / "{rollout_id}",
        save_debug_rollout_data=tmp_path / "samples" / "{rollout_id}.pt",
    )
    process, gate = runs.start(words, "train_async.py"), gates.Gate(run_dir)
    gate.wait(process)
    runs.wait_for(lambda: trained(run_dir) == list(range(gates.HELD)), process)
    updates = count_updates(run_dir)
    psutil.Process(runs.engine_facts(run_dir, 0)["pid"]).kill()
    runs.wait_for(lambda: count_updates(run_dir) > updates, process)
    time.sleep(1)  # a moment later the new engine may be asked, too
    gate.open()
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert output.count("engine 0 failed and was started again") == 1
    seen = set()
    for rollout_id in range(4):
        record = torch.load(tmp_path / "samples" / f"{rollout_id}.pt", weights_only=True)
        for sample in record["samples"]:
            [version] = set(sample["weight_versions"])
            seen.add((rollout_id, version))
            folder = tiny_model if version == 1 else exports / str(version - 2)
            expected = log_probs(folder, sample)
            found = torch.tensor(sample["rollout_log_probs"])
            assert (found - expected).abs().max() < 1e-4, (rollout_id, version)
    # Rollout 2 was made by the engine that lived on, and by the new one with what was newest.
    assert seen == {(0, 1), (1, 1), (2, 2), (2, 3), (3, 3)}
    staleness = {r["rollout_id"]: r for r in runs.metrics(run_dir, "rollout")}
    assert staleness[2]["rollout/staleness_max"] == 1
    assert 0 < staleness[2]["rollout/staleness_mean"] < 1
    assert staleness[3]["rollout/staleness_mean"] == 1


def count_updates(run_dir: Path) -> int:
    return (run_dir / "logs" / "trainer_0.log").read_text().count("weights ")


def log_probs(folder: Path, sample: dict) -> torch.Tensor:
    """Of the response, by the plain model in one forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(sample["tokens"])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    of_next = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return of_next[-sample["response_length"] :]


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
    assert "no engine was available for 15 s" in output
    assert "Traceback" not in output
    assert trained(run_dir) == list(range(gates.HELD))
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(tracker.read_text()) == gates.HELD - 1
    hidden.rename(weights)
    status, output = runs.run([*words, "--load", str(tmp_path / "checkpoints")])
    assert status == 0, output
    assert trained(run_dir) == list(range(4))
