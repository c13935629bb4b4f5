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
