"""A user's mistake costs one clear message: no traceback, and nothing started."""

import json
import shutil
import socket

import pytest

from tests.e2e import runs
from tests.tiny import make_tiny_checkpoint


def refused(words: list[str], *expected: str) -> None:
    status, output = runs.run(words)
    assert status != 0, output
    assert "Traceback" not in output, output
    for text in expected:
        assert text in output, output


def test_unknown_flag(tiny_model, tiny_data, tmp_path):
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", rolout_batch_size=4)
    status, output = runs.run(words)
    assert status == 2
    assert "--rolout-batch-size" in output and "--rollout-batch-size" in output
    assert "Traceback" not in output


def test_missing_data_file(tiny_model, tmp_path):
    refused(
        runs.command(tiny_model, tmp_path / "no.jsonl", tmp_path / "run"),
        str(tmp_path / "no.jsonl"),
    )


def test_malformed_line(tiny_model, tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"input": "1+1=", "label": "2"})] * 20
    lines[16] = '{"input": "1+1='
    data.write_text("\n".join(lines) + "\n")
    refused(runs.command(tiny_model, data, tmp_path / "run"), str(data), "17")


def test_key_not_in_the_data(tiny_model, tiny_data, tmp_path):
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", input_key="question")
    refused(words, "question", "--input-key", "input")


def test_empty_dataset(tiny_model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("")
    refused(runs.command(tiny_model, data, tmp_path / "run"), str(data), "empty")


def test_checkpoint_of_another_architecture(plain_run, tiny_data, tmp_path):
    other, saved = make_tiny_checkpoint(tmp_path / "other", hidden_size=32), plain_run.checkpoints
    words = runs.command(other, tiny_data, tmp_path / "run", load=saved, num_rollout=4)
    refused(words, str(saved))


def test_reward_hook_that_always_raises_stops_the_run(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model, tiny_data, tmp_path / "run", custom_rm_path="tests.e2e.rewards.broken"
    )
    refused(words, "every sample of rollout 0 failed", "tests/e2e/rewards.py", "no reward today")


def test_reward_hook_that_sometimes_raises_is_counted(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model, tiny_data, tmp_path / "run", custom_rm_path="tests.e2e.rewards.flaky"
    )
    status, output = runs.run(words)
    assert status == 0, output
    failed = [record["rollout/failed"] for record in runs.metrics(tmp_path / "run", "rollout")]
    assert failed == [4, 4, 4]  # one of the four samples of each of the four prompts
    assert output.count("warning: 4 of 16 samples of rollout 0 failed and do not count") == 1
    assert output.count("failed 4  ") == 3


def test_port_taken(tiny_model, tmp_path):
    import subprocess
    import sys

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "slime.cli", "engine", "--model-path", str(tiny_model)]
        done = subprocess.run(
            [*words, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=runs.ROOT,
        )
    assert done.returncode != 0
    assert str(port) in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("temperature", ["0", "-1"])
def test_temperature_must_be_positive(tiny_model, tiny_data, tmp_path, temperature):
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", rollout_temperature=temperature)
    refused(words, "--rollout-temperature")


def test_weights_that_were_cut_off_and_folders_that_cannot_be_written_to(
    tiny_model, tiny_data, tmp_path
):
    """Each is found within seconds, before a process is started."""
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(runs.command(broken, tiny_data, tmp_path / "run"), str(weights), "download or copy")
    (tmp_path / "file").write_text("")
    under = tmp_path / "file" / "under"
    refused(runs.command(tiny_model, tiny_data, under), f"--run-dir {under} cannot be written to")
    for flag in ("save", "save_hf"):
        words = runs.command(tiny_model, tiny_data, tmp_path / f"run_{flag}", **{flag: under / "x"})
        refused(words, f"--{flag.replace('_', '-')} {under}", "cannot be written to")
