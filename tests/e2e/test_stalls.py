"""A run that gets no further says where every process is, who the others wait for, and ends."""

import json
import os
import re
import signal
import time

import psutil

from tests.e2e import runs

TWO_RANKS = {"actor_num_gpus_per_node": 2, "save_interval": 1, "num_rollout": 4}


def test_a_rank_that_oversleeps_is_named_with_its_stack(tiny_model, tiny_data, tmp_path):
    words = _command(tiny_model, tiny_data, tmp_path, "oversleep")
    status, output = runs.run(words)
    assert status == 1, output
    assert "train has taken more than 30 s" in output
    assert re.search(r"The others wait for trainer rank 1 \(pid \d+ on [\d.]+\)\.", output), output
    assert "in oversleep: time.sleep(600)" in output
    _check_end(output, tmp_path)


def test_a_stopped_rank_is_named(tiny_model, tiny_data, tmp_path):
    process = runs.start(_command(tiny_model, tiny_data, tmp_path, "tell_pid", num_rollout=400))
    saved = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    runs.wait_for(saved.exists, process)
    rank = int((tmp_path / "run" / "rank_1.pid").read_text())
    os.kill(rank, signal.SIGSTOP)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    said = rf"trainer rank 1 \(pid {rank} on [\d.]+\) is stopped \(kill -CONT {rank} "
    assert re.search(said, output), output
    assert "The others wait for trainer rank 1" in output
    _check_end(output, tmp_path)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(rank) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not psutil.pid_exists(rank)


def test_a_hung_engine_is_replaced(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        num_rollout=3,
        custom_rm_path="tests.e2e.stall_hooks.slow_reward",
        rollout_health_check_interval=1,
        rollout_health_check_timeout=2,
    )
    process = runs.start(words)
    log = tmp_path / "run" / "metrics.jsonl"
    runs.wait_for(lambda: log.exists() and '"kind":"perf"' in log.read_text(), process)
    port_file = tmp_path / "run" / "logs" / "engine_0.port"
    os.kill(json.loads(port_file.read_text())["pid"], signal.SIGSTOP)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "engine 0 failed and was started again" in output
    assert len(runs.metrics(tmp_path / "run", "train")) == 3


def _command(tiny_model, tiny_data, tmp_path, hook: str, **overrides) -> list[str]:
    return runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        **{
            **TWO_RANKS,
            "save": tmp_path / "saved",
            "rollout_data_postprocess_path": f"tests.e2e.stall_hooks.{hook}",
            "phase_timeout_minutes": '{"train": 0.5, "update_weights": 0.5, "save": 0.5}',
            **overrides,
        },
    )


def _check_end(output: str, tmp_path) -> None:
    assert f"continue with the same command and --load {tmp_path / 'saved'}" in output
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").exists()
    assert "Traceback" not in output, output
