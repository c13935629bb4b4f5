"""`slime.train` from a script: functions of `__main__` reach the actors, and the run can be used afterwards."""

from __future__ import annotations

import ast
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime.core.errors import UserError
from tests.e2e import api_script, runs

SCRIPT = Path(api_script.__file__)


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory) -> slime.Run:
    folder = tmp_path_factory.mktemp("api")
    process = start(tiny_model, folder / "run", 2)
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert json.loads(output.splitlines()[-1])["status"] == 0
    return slime.load_run(folder / "run")


def start(model: Path, folder: Path, num_rollout: int) -> subprocess.Popen[str]:
    """In a copy elsewhere, so that no process can import the script's functions."""
    script = folder.parent / "script.py"
    script.write_text(SCRIPT.read_text())
    return subprocess.Popen(
        [sys.executable, str(script), str(model), str(folder), str(num_rollout)],
        cwd=folder.parent,
        env=runs.environment(forks=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_metrics_and_samples_hold_what_the_functions_returned(run):
    assert [row["rollout_id"] for row in run.metrics if row["rollout_id"] >= 0] == [0, 1]
    assert all("train/loss" in row and "rollout/reward_mean" in row for row in run.metrics[-2:])
    assert run.samples
    for sample in run.samples:
        parts = {
            "digits": sum(c.isdigit() for c in sample["response"]) / 8,
            "bonus": 0.25,
            "answered": float(sample["label"] in sample["response"]),
            "lambda": 0.5 * (sample["label"] == "0"),
        }
        total = sum(parts.values())
        assert sample["reward"] == pytest.approx(total)
        assert sample["rewards"] == pytest.approx({"reward": total, **parts})


def test_the_functions_are_private(run):
    file = run.path / "inputs" / "functions.pkl"
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_model_generates_as_transformers_does(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["1+2=", "3+3="]
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    texts = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(**tokens, max_new_tokens=6, do_sample=False)
        new = output[0, tokens["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    assert run.generate(prompts, max_tokens=6, temperature=0) == texts


def test_evaluate_scores_with_the_stored_functions_or_others(run):
    rows = api_script.ROWS[:3]
    result = run.evaluate(rows, temperature=0)
    for row, sample in zip(rows, result["samples"], strict=True):
        assert (sample["prompt"], sample["label"]) == (row["prompt"], row["answer"])
        assert sample["reward"]["bonus"] == 0.25
    assert result["reward"] == pytest.approx(
        sum(s["reward"]["reward"] for s in result["samples"]) / 3
    )
    assert run.evaluate(rows, lambda sample: len(sample.prompt), temperature=0)["reward"] == 4


def test_a_run_is_resumed_in_another_process(run):
    program = (
        f"import slime; print(slime.load_run({str(run.path)!r}).resume(num_rollout=3).exit_status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=run.path.parent,
        env=runs.environment(forks=True),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["0"], done.stdout + done.stderr
    assert [row["rollout_id"] for row in run.metrics if row["rollout_id"] >= 0] == [0, 1, 2]
    assert [path.name for path in run.checkpoints] == ["iter_0000001", "iter_0000002"]


def test_ctrl_c_saves_and_returns_the_run(tiny_model, tmp_path):
    folder = tmp_path / "run"
    process = start(tiny_model, folder, 500)
    runs.wait_for(
        lambda: (folder / "metrics.jsonl").exists() and len(runs.metrics(folder, "train")) > 1,
        process,
    )
    process.send_signal(signal.SIGINT)
    output = runs.finish(process, timeout=60)
    last = json.loads(output.splitlines()[-1])
    assert process.returncode == 0 and last["status"] == 130, output
    stopped = slime.load_run(folder)
    assert len(stopped.checkpoints) == 1 and stopped.model.is_dir()


def test_the_lines_of_the_readme_run(tiny_model, tmp_path):
    text = (runs.ROOT / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(import slime\n.*?)```", text, re.DOTALL)
    assert len([line for line in lines.splitlines() if line]) <= 8
    lines = lines.replace("path/to/hf-model", str(tiny_model)).replace("t=20", "t=2")
    (tmp_path / "readme.py").write_text(lines)
    done = subprocess.run(
        [sys.executable, "readme.py"],
        cwd=tmp_path,
        env=runs.environment(forks=True),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    reward = slime.load_run(folder).metrics[-1]["rollout/reward_mean"]
    printed, texts = done.stdout.splitlines()[-1].split(" ", 1)
    assert float(printed) == reward
    (text,) = ast.literal_eval(texts)  # a tiny random model writes quotes and backslashes too
    assert isinstance(text, str)


def test_a_foreign_folder_is_no_run(tmp_path):
    with pytest.raises(UserError, match="not the folder of a run"):
        slime.load_run(tmp_path)
