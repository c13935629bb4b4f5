"""`slime quickstart` as a user starts it: the reward rises, and what was promised is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs


@pytest.mark.timeout(900)
def test_quickstart_turns_the_sorting_round(tmp_path):
    folder = tmp_path / "quickstart"
    command = [sys.executable, "-m", "slime.cli", "quickstart", "--run-dir", str(folder)]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluations = [r["eval/sorting/reward"] for r in runs.metrics(folder / "grpo", "eval")]
    assert evaluations[0] < 0.3
    assert evaluations[-1] > 0.8
    assert f"from {evaluations[0]:.2f} to {evaluations[-1]:.2f}" in done.stdout
    assert done.stdout.count("Next, try:") == 1  # the last stage alone has closing words
    _check_run_folder(folder / "grpo")
    _check_that_the_export_sorts(folder)


def _check_run_folder(run_dir: Path) -> None:
    for name in ("config.yaml", "report.html", "samples.jsonl", "logs/engine_0.log"):
        assert (run_dir / name).stat().st_size > 0
    assert (run_dir / "logs" / "trainer_0.log").exists()
    assert (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    gaps = [r["train/log_prob_gap_max"] for r in runs.metrics(run_dir, "train")]
    assert max(gaps) < 1e-4


def _check_that_the_export_sorts(folder: Path) -> None:
    """Plain transformers reads the export and gives the answers the reward asked for."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "grpo" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "grpo" / "hf")
    lines = (folder / "data" / "heldout.jsonl").read_text().splitlines()[:100]
    right = 0
    for row in map(json.loads, lines):
        chat = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(
            output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += answer == row["answer"]
    assert right > 80
