"""`slime eval`: the figures of a model, without a trainer; of a run, with its data and reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e import runs

_LENGTH = 8


def slime_eval(*words: object, folder: Path = runs.ROOT) -> tuple[int, str]:
    command = [sys.executable, "-m", "slime.cli", "eval", *map(str, words)]
    env = runs.environment(forks=True)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@torch.no_grad()
def greedy_rewards(model_path: Path, data: Path) -> list[float]:
    """The share of even tokens in the greedy response of Hugging Face's model to each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rewards = []
    for line in data.read_text().splitlines():
        ids = tokenizer(json.loads(line)["input"], return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=_LENGTH, do_sample=False)[0, ids.shape[1] :]
        rewards.append(sum(token % 2 == 0 for token in out.tolist()) / len(out))
    return rewards


def test_a_model_on_data_with_a_reward(tiny_model, tiny_data, tmp_path):
    run_dir = tmp_path / "run"
    status, output = slime_eval(
        tiny_model, "--eval-prompt-data", "sums", tiny_data, "--label-key", "label",
        "--custom-rm-path", "tests.e2e.rewards.parts", "--reward-key", "even", "--eval-temperature", 0,
        "--rollout-max-response-len", _LENGTH, "--run-dir", run_dir,
    )  # fmt: skip
    assert status == 0, output
    expected = greedy_rewards(tiny_model, tiny_data)
    (record,) = runs.metrics(run_dir, "eval")
    assert record["rollout_id"] == -1
    mean = sum(expected) / len(expected)
    assert record["eval/sums/reward"] == pytest.approx(mean)
    assert record["eval/sums/reward/even"] == pytest.approx(mean)
    assert not runs.metrics(run_dir, "train") and not (run_dir / "logs" / "trainer_0.log").exists()
    head, row = output.split("\n\n")[1].splitlines()
    assert head.split()[:4] == ["dataset", "reward", "reward/even", "reward/long"]
    assert row.split()[:2] == ["sums", f"{mean:.3f}".rstrip("0")]
    assert "evaluation" in (run_dir / "report.html").read_text()
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"eval/sums"} and rows[0]["rewards"].keys() == {
        "even",
        "long",
    }


def test_the_model_of_a_run_with_its_own_data_and_reward(tiny_model, tiny_data, tmp_path):
    """Its last evaluation and that of `slime eval` agree: both are greedy, on the trained weights."""
    run_dir = tmp_path / "run"
    words = runs.command(
        tiny_model, tiny_data, run_dir, num_rollout=2, eval_interval=2, eval_temperature=0,
        eval_prompt_data=["sums", tiny_data], save_hf=run_dir / "hf", lr=0.05,
    )  # fmt: skip
    status, output = runs.run(words)
    assert status == 0, output
    first, last = (r["eval/sums/reward"] for r in runs.metrics(run_dir, "eval"))
    status, output = slime_eval(run_dir, "--run-dir", tmp_path / "eval")
    assert status == 0, output
    (record,) = runs.metrics(tmp_path / "eval", "eval")
    assert first != last and record["eval/sums/reward"] == pytest.approx(last)


def test_mistakes_are_one_sentence(tiny_model, tiny_data, tmp_path):
    data = ["--eval-prompt-data", "x", tiny_data]
    for words, sentence in (
        (["--rm-type", "math"], "needs a model as its first argument"),
        ([tiny_model], "--eval-interval needs data: give --eval-prompt-data NAME PATH"),
        ([tiny_model, "--num-rollout", 3], "slime eval sets --num-rollout itself: remove it"),
        ([tmp_path / "none", *data, "--rollout-max-response-len", 4], "none does not exist"),
    ):
        status, output = slime_eval(*words, folder=tmp_path)
        assert status == 2 and sentence in output and "Traceback" not in output, output
