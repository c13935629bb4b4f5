"""Whole runs by every estimator: each loss and gradient norm is that of a naive loop on the same samples.

Engines generate, the trainer takes two steps per rollout, and the new weights go back; the naive loop
gets the samples that the run wrote down and nothing else, so an error would grow from rollout to rollout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.config.arguments import parse_args
from slime.core.types import Sample
from slime.data.stored_samples import load_debug_samples
from tests import naive_rl
from tests.e2e import runs
from tests.engines import TOKEN, engine_server
from tests.tiny import make_tiny_checkpoint

ROLLOUTS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"eps_clip": 0.02, "eps_clip_high": 0.03, "use_tis": True},
    "dr_grpo": {"disable_grpo_std_normalization": True, "calculate_per_token_loss": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.003, "eps_clip_high": 0.004},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 0.02},
    "rloo": {"advantage_estimator": "rloo", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "kl_coef": 0.05,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "normalize_advantages": True,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_is_that_of_the_naive_loop(name, tiny_model, tiny_data, tmp_path):
    _run_and_compare(tiny_model, tiny_data, tmp_path, SETTINGS[name])


def test_a_student_follows_a_served_teacher(tiny_model, tiny_data, tmp_path, monkeypatch):
    """Without any reward: what is learned is the teacher, and the KL to it falls."""
    teacher = make_tiny_checkpoint(tmp_path / "teacher", "llama", seed=5, weight_scale=2.0)
    with engine_server(teacher) as server:
        monkeypatch.setenv("SLIME_RM_TOKEN", TOKEN)
        flags = {"use_opd": True, "opd_type": "sglang", "rm_url": server.url, "lr": 3e-3}
        trained = _run_and_compare(
            tiny_model, tiny_data, tmp_path, {**flags, "custom_rm_path": None}
        )
    assert trained[0]["train/opd_kl"] > trained[-1]["train/opd_kl"] > 0


def _run_and_compare(model: Path, data: Path, folder: Path, flags: dict[str, Any]) -> list[dict]:
    pattern = str(folder / "samples_{rollout_id}.pt")
    words = runs.command(
        model,
        data,
        folder / "run",
        **{
            "num_rollout": ROLLOUTS,
            # The same samples in every run of the test: near a clip a rounding decides a gradient.
            "sglang_enable_deterministic_inference": True,
            "num_steps_per_rollout": 2,
            "global_batch_size": 8,
            "lr_decay_style": "constant",
            "adam_eps": 1e-4,
            "save_debug_rollout_data": pattern,
            **flags,
        },
    )
    status, output = runs.run(words)
    assert status == 0, output
    rollouts = [_samples(pattern, rollout_id) for rollout_id in range(ROLLOUTS)]
    expected = naive_rl.learn(parse_args(words), str(model), rollouts)
    trained = runs.metrics(folder / "run", "train")
    for record, loss, norm in zip(trained, expected.losses, expected.grad_norms, strict=True):
        assert record["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
        assert record["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert record["train/log_prob_gap_max"] < 1e-4
    return trained


def _samples(pattern: str, rollout_id: int) -> list[Sample]:
    samples = [s for group in load_debug_samples(pattern, rollout_id) for s in group]
    for sample in samples:
        sample.loss_mask = sample.loss_mask or [1] * sample.response_length
    return samples
