"""Whole runs with images: what the engine says it sampled is what the trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import runs
from tests.tiny_vision import make_vision_checkpoint, write_image_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_rows(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3_vl", {"no_freeze_vision_tower": True}),
        ("qwen3_5", {"colocate": True, "rollout_num_gpus": None}),
        ("qwen3_vl_moe", {"train_backend": "megatron", "no_freeze_vision_tower": True}),
    ],
)
def test_trainer_and_engine_agree_on_log_probs(data, tmp_path, family, flags):
    model = make_vision_checkpoint(tmp_path / "m", family)
    keys = {"multimodal_keys": '{"image": "images"}', "apply_chat_template": True}
    status, output = runs.run(runs.command(model, data, tmp_path / "run", **keys, **flags))
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    assert all(record["train/grad_norm"] > 0 for record in trained), trained
