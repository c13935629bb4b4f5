"""Engines that are lost in the middle of an update, and all engines lost at once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil

from slime.utils.sync_http import HttpError, get_json
from tests.e2e import runs
from tests.tiny import make_tiny_checkpoint


def facts(run_dir: Path, engine: int) -> dict:
    return json.loads((run_dir / "logs" / f"engine_{engine}.port").read_text())


def trained(run_dir: Path) -> list[int]:
    if not (run_dir / "metrics.jsonl").exists():
        return []
    return [record["rollout_id"] for record in runs.metrics(run_dir, "train")]


def is_paused(port: int) -> bool:
    """As an engine is from the beginning of an update to its end."""
    try:
        info = get_json(f"http://127.0.0.1:{port}/server_info", timeout=10, retries=0)
    except HttpError:
        return False
    return bool(info["internal_states"][0]["paused"])


def lose_one_in_an_update(words, run_dir, number: signal.Signals, *, timeout_s: float) -> int:
    """Send the signal to engine 0 in an update; the run replaces it and goes on. Its process id."""
    process = runs.start(words)
    runs.wait_for(lambda: len(trained(run_dir)) >= 1, process)
    victim, other = facts(run_dir, 0), facts(run_dir, 1)
    runs.wait_for(lambda: is_paused(victim["port"]), process)
    os.kill(victim["pid"], number)
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    assert output.count("engine 0 failed and was started again") == 1
    assert "engine 1 failed" not in output
    assert facts(run_dir, 1) == other
    assert trained(run_dir) == list(range(4))
    records = runs.metrics(run_dir, "train")
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in records), records
    return victim["pid"]


def test_an_engine_lost_in_a_broadcast_is_replaced_and_the_other_runs_on(
    tiny_model, tiny_data, tmp_path
):
    run_dir = tmp_path / "run"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=4,
        rollout_num_gpus=2,
        update_weight_transport="distributed",
        update_weight_buffer_size=8192,  # many buckets: the update takes a while
    )
    lose_one_in_an_update(words, run_dir, signal.SIGKILL, timeout_s=300)


def test_an_engine_frozen_in_an_update_is_replaced_and_the_other_runs_on(
    tiny_model, tiny_data, tmp_path
):
    """Well before the ten minutes that a broadcast may take."""
    run_dir = tmp_path / "run"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=4,
        rollout_num_gpus=2,
        update_weight_transport="distributed",
        update_weight_buffer_size=1024,  # a bucket per tensor: the update takes a while
        rollout_health_check_interval=1,
        rollout_health_check_timeout=5,
    )
    lost = lose_one_in_an_update(words, run_dir, signal.SIGSTOP, timeout_s=240)
    assert not psutil.pid_exists(lost)


def test_with_every_engine_dead_the_run_waits_then_saves_and_ends(tiny_data, tmp_path):
    """They cannot come back: the weights they start from are gone. Once those are there again, the run
    goes on from where it stopped."""
    model = make_tiny_checkpoint(tmp_path / "model", weight_scale=2.0)
    run_dir = tmp_path / "run"
    words = runs.command(
        model,
        tiny_data,
        run_dir,
        num_rollout=200,
        rollout_num_gpus=2,
        rollout_health_check_interval=1,
        rollout_no_engine_timeout=3,
        save=tmp_path / "checkpoints",
    )
    process = runs.start(words)
    runs.wait_for(lambda: len(trained(run_dir)) >= 2, process)
    weights, hidden = model / "model.safetensors", tmp_path / "hidden"
    weights.rename(hidden)
    for engine in (0, 1):
        os.kill(facts(run_dir, engine)["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "could not be started again so far" in output
    assert "no engine is left, so generation waits" in output
    assert "there was no engine to generate with for 3 s" in output
    assert "Traceback" not in output
    done = trained(run_dir)
    assert done == list(range(len(done)))
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved in (done[-1], done[-1] + 1), (saved, done)
    hidden.rename(weights)
    again = runs.command(
        model,
        tiny_data,
        run_dir,
        num_rollout=len(done) + 2,
        rollout_num_gpus=2,
        save=tmp_path / "checkpoints",
        load=tmp_path / "checkpoints",
    )
    status, output = runs.run(again)
    assert status == 0, output
    assert trained(run_dir) == list(range(len(done) + 2))
