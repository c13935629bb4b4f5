"""An engine that dies is started again, given the current weights, and no sample is lost."""

import json
import os
import signal

from tests.e2e import runs


def test_a_killed_engine_comes_back_with_the_current_weights(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        num_rollout=8,
        rollout_num_gpus=2,
        rollout_health_check_interval=1,
    )
    process = runs.start(words)
    log = tmp_path / "run" / "metrics.jsonl"
    runs.wait_for(lambda: log.exists() and '"kind":"train"' in log.read_text(), process)
    port_file = tmp_path / "run" / "logs" / "engine_0.port"
    os.kill(json.loads(port_file.read_text())["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "engine 0 failed and was started again" in output
    trained = runs.metrics(tmp_path / "run", "train")
    assert [record["rollout_id"] for record in trained] == list(range(8))
    # Had it generated with the weights it was started from, its log-probs would be off.
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    rollouts = runs.metrics(tmp_path / "run", "rollout")
    assert all(record["rollout/samples"] == 16 for record in rollouts)
