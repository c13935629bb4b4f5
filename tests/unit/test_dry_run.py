"""--dry-run refuses what a start would refuse, with the same sentence and status."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import train
from tests.args import make_argv
from tests.tiny import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]


@dataclass
class Case:
    flags: dict[str, Any]
    said: str


CASES = [
    Case({"input_key": "prompt"}, "no key 'prompt'; the keys are input, label"),
    Case({"label_key": "nolabel"}, "no key 'nolabel'; the keys are input, label"),
    Case({"custom_rm_path": "nomod.f"}, "--custom-rm-path nomod.f: module 'nomod' does not exist"),
    Case({"custom_rm_path": "json.nofn"}, "--custom-rm-path json.nofn"),
    Case({"custom_rm_path": "os.path.exists"}, "--custom-rm-path os.path.exists"),
    Case({"custom_generate_function_path": "json.dumps"}, "--custom-generate-function-path"),
    Case({"data_source_path": "json.dumps"}, "--data-source-path json.dumps"),
    Case({"rollout_batch_size": None}, "slime: --rollout-batch-size is missing"),
    Case({"num_rollout": None}, "slime: how long to train is missing"),
    Case({"rollout_temperature": 0}, "slime: --rollout-temperature must be above 0"),
]


@pytest.fixture
def refusal(tmp_path, capsys):
    """Return what a dry run and then a start say; both must exit with 2, before Ray."""

    def run(**flags: Any) -> str:
        argv = make_argv(**{"run_dir": str(tmp_path / "run"), **flags})
        assert train.main([*argv, "--dry-run"]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert train.main(argv) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1] == said
        return said

    return run


def test_folders_of_something_else_are_refused_as_at_a_start(refusal, tmp_path):
    model = str(make_tiny_checkpoint(tmp_path / "model"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    said = refusal(hf_checkpoint=model, run_dir=str(tmp_path / "other"))
    assert "is not the folder of a slime run" in said
    assert "--run-dir" in refusal(hf_checkpoint=model, run_dir=str(tmp_path / "file"))
    assert "--save" in refusal(hf_checkpoint=model, save=str(tmp_path / "file"))
    said = refusal(hf_checkpoint=model, load=str(tmp_path / "other"), ckpt_step=3)
    assert "--ckpt-step 3" in said


def test_a_checkpoint_without_a_tokenizer_is_refused_as_at_a_start(refusal, tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", with_tokenizer=False)
    assert "holds no tokenizer" in refusal(hf_checkpoint=str(model))


def test_patterns_that_match_nothing_are_refused_as_at_a_start(refusal, tmp_path):
    model = str(make_tiny_checkpoint(tmp_path / "model"))
    said = refusal(hf_checkpoint=model, freeze_params_name_list=["vision"])
    assert "--freeze-params-name-list vision matches no parameter" in said


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.flags))
def test_refused_as_at_a_start(case, capsys):
    assert train.main([*make_argv(**case.flags), "--dry-run"]) == 2
    output = capsys.readouterr()
    assert case.said in output.err
    assert "Not for this machine" not in output.out


def dictionary_reward(args, sample):
    return {"exact": float(sample.response == str(sample.label)), "length": 2.0}


def number_reward(args, sample):
    return 1.0


def failing_reward(args, sample):
    raise ConnectionError("no judge here")


@pytest.mark.parametrize(
    ("hook", "key", "status", "said"),
    [
        (
            "dictionary_reward",
            "exact",
            0,
            "gives 1 for the first row, with its label as the response",
        ),
        ("number_reward", "exact", 2, "is a number, not a dictionary: remove --reward-key exact"),
        ("dictionary_reward", None, 2, "keys ['exact', 'length']; --reward-key is None"),
        ("failing_reward", None, 0, "raised on the first row: ConnectionError: no judge here"),
    ],
)
def test_the_reward_is_called_once(hook, key, status, said, tmp_path, capsys):
    """With what it gives a wrong --reward-key is found; what only the run can reach refuses nothing."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1+1=", "label": 2}\n')
    flags = {
        "hf_checkpoint": str(make_tiny_checkpoint(tmp_path / "model")),
        "prompt_data": [str(data)],
    }
    hook = f"tests.unit.test_dry_run.{hook}"
    argv = make_argv(**flags, custom_rm_path=hook, rm_type=None, reward_key=key, label_key="label")
    assert train.main([*argv, "--dry-run"]) == status
    output = capsys.readouterr()
    assert said in output.out + output.err


@pytest.mark.parametrize("words", [["--json"], ["--suggest"], ["--html", "plan.html"]])
def test_options_of_the_plan_are_refused(words, capsys):
    assert train.main([*make_argv(), "--dry-run", *words]) == 2
    assert f"{words[0]} is an option of slime plan" in capsys.readouterr().err


def test_hooks_of_the_current_folder_are_found_wherever_the_script_is(tmp_path):
    (tmp_path / "my_rewards.py").write_text("def reward(args, sample):\n    return 1.0\n")
    argv = make_argv(custom_rm_path="my_rewards.missing", rm_type=None)
    done = subprocess.run(
        [sys.executable, ROOT / "train_async.py", *argv, "--dry-run"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "my_rewards has no 'missing'" in done.stderr
