"""A run that is killed and started again ends where the unbroken one does, bit for bit."""

import json
import os
import signal

import pytest

from tests.e2e import runs

ROLLOUTS = 5


def flags(tmp_path, name: str, tiny_data) -> dict:
    save = tmp_path / name / "checkpoints"
    return {
        "sglang_enable_deterministic_inference": True,
        "num_rollout": ROLLOUTS,
        "save": save,
        "load": save,
        "save_interval": 1,
        "save_total_limit": 2,
        "eval_interval": 2,
        "eval_prompt_data": ["held", tiny_data],
        "lr_decay_style": "linear",
        "lr_warmup_iters": 2,
    }


@pytest.fixture(scope="module")
def unbroken_folder(tiny_model, tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    options = {**flags(folder, "run", tiny_data), "save_hf": folder / "hf_{rollout_id}"}
    status, output = runs.run(runs.command(tiny_model, tiny_data, folder / "run", **options))
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def unbroken(unbroken_folder):
    return runs.learning(unbroken_folder / "run")


def test_an_export_with_a_number_in_its_name_comes_with_each_checkpoint(unbroken_folder):
    written = {file.parent.name for file in unbroken_folder.glob("hf_*/config.json")}
    assert written == {f"hf_{rollout}" for rollout in range(ROLLOUTS)}


@pytest.mark.parametrize("phase", ["rollout", "train"])
def test_killed_run_continues_bitwise(tiny_model, tiny_data, tmp_path, unbroken, phase):
    words = runs.command(
        tiny_model, tiny_data, tmp_path / "run", **flags(tmp_path, "run", tiny_data)
    )
    process = runs.start(words)
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    seen = "1" if phase == "train" else "2"
    runs.wait_for(lambda: tracker.exists() and tracker.read_text().strip() >= seen, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == unbroken


def test_sigterm_saves_and_the_rest_is_continued_bitwise(tiny_model, tiny_data, tmp_path, unbroken):
    options = {**flags(tmp_path, "run", tiny_data), "save_interval": None}
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", **options)
    process = runs.start(words)
    log = tmp_path / "run" / "metrics.jsonl"
    runs.wait_for(lambda: log.exists() and '"rollout_id": 1' in _spaced(log), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    saved = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert saved.exists(), output
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == unbroken


def _spaced(log) -> str:
    return "\n".join(
        json.dumps(json.loads(line)) for line in log.read_text().splitlines() if line.endswith("}")
    )
