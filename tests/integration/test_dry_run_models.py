"""--dry-run builds the model of a run without weights, refuses what cannot be built, and writes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

import train
from tests.args import make_argv
from tests.tiny import make_tiny_checkpoint

MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
}


@pytest.fixture
def refusal(tmp_path, capsys):
    def run(config: dict[str, Any], **flags: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert train.main([*make_argv(hf_checkpoint=str(tmp_path), **flags), "--dry-run"]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run


def test_a_model_that_cannot_be_built_is_refused(refusal):
    """A start finds out in a trainer process."""
    said = refusal({**MODEL, "hidden_act": "nosuch"})
    assert "the model cannot be built: KeyError: " in said and "nosuch" in said


def test_what_megatron_refuses_is_refused(refusal):
    flags = {"recompute_granularity": "selective", "recompute_modules": ["nosuch"]}
    said = refusal(MODEL, train_backend="megatron", **flags)
    assert "megatron-core refuses the model or its layout: " in said and "nosuch" in said


def test_a_dry_run_writes_nothing(tmp_path):
    model = str(make_tiny_checkpoint(tmp_path / "model"))
    flags = {"save": str(tmp_path / "save"), "save_hf": str(tmp_path / "hf" / "{rollout_id}")}
    argv = make_argv(hf_checkpoint=model, run_dir=str(tmp_path / "run"), **flags)
    assert train.main([*argv, "--dry-run"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def report(tmp_path, capsys):
    """Return what a dry run of one row prints, as sections of lines; it must exit with 0."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1+1=", "label": 2}\n')
    model = str(make_tiny_checkpoint(tmp_path / "model"))

    def run(*words: str, **flags: Any) -> dict[str, list[str]]:
        given = {"hf_checkpoint": model, "prompt_data": [str(data)], "lr": 0.5, **flags}
        assert train.main([*make_argv(**given), "--dry-run", *words]) == 0
        parts = [part.splitlines() for part in capsys.readouterr().out.split("\n\n")]
        return {part[0]: [" ".join(line.split()) for line in part[1:]] for part in parts if part}

    return run


def test_a_dry_run_for_this_machine_says_what_was_set_derived_and_checked(report, tmp_path):
    """Batches of 4 do not divide among 8 GPUs: nothing may be resolved for GPUs that do not exist."""
    shown = report(rollout_batch_size=4, n_samples_per_prompt=1, rm_type="random")
    assert list(shown)[:3] == ["Set", "Derived", "Placement"]
    assert "lr command line 0.5" in shown["Set"]
    assert "global_batch_size derived 4" in shown["Derived"]
    assert not any("weight_decay" in line for lines in shown.values() for line in lines)
    assert "data 1 row of " + str(tmp_path / "data.jsonl") in shown["Checked"]
    assert any(line.startswith("model built without weights, ") for line in shown["Checked"])
    assert not any("GPU" in heading for heading in shown)
    assert sum(map(len, shown.values())) < 70


def test_the_plan_is_printed_for_a_machine_that_is_described(report, tmp_path):
    """With --all, defaults are printed too."""
    shown = report("--gpus", "8", "--all", prompt_data=[str(tmp_path / "elsewhere.jsonl")])
    assert "Plan for GPUs, of which this machine has none" in shown
    lines = [line for lines in shown.values() for line in lines]
    assert any(line.startswith("trainer 8 GPUs = TP 1 x PP 1 x CP 1 x DP 8") for line in lines)
    assert "lr command line 0.5" in lines and "weight_decay default 0.01" in lines
    assert f"data not checked: {tmp_path / 'elsewhere.jsonl'} does not exist here" in lines
