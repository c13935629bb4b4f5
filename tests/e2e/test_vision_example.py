"""examples/vision as whole runs: a small Qwen3-VL learns what is in the picture alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.vision.counting import CHANCE, make_task
from tests.e2e import runs


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counting")
    make_task(folder, num_train=256, num_heldout=128)
    return folder


def train(task: Path, run_dir: Path, *flags: str) -> dict[str, list[float]]:
    """Run the example's script; return the curves by metric."""
    env = {
        **runs.environment(forks=True), "DATA": str(task), "RUN_DIR": str(run_dir),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    words = ["bash", str(runs.ROOT / "examples/vision/run.sh"), *flags]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    curves: dict[str, list[float]] = {}
    for kind in ("train", "eval"):
        for record in runs.metrics(run_dir, kind):
            for name, value in record.items():
                curves.setdefault(name, []).append(value)
    return curves


@pytest.mark.long
def test_reward_rises_and_falls_to_chance_without_the_image(task, tmp_path):
    flags = ("--num-rollout", "40", "--eval-interval", "40")
    found = train(task, tmp_path / "run", *flags)
    first, last = found["eval/counting/reward"][0], found["eval/counting/reward"][-1]
    assert last > first + 0.15, found["eval/counting/reward"]
    assert max(found["eval/blank/reward"]) < CHANCE + 0.15 < last
    assert max(found["train/log_prob_gap_max"]) < 1e-4


@pytest.mark.long
def test_other_trainers_of_the_language_half_agree_with_the_engine(task, tmp_path):
    """Adapters, the tower frozen and GPUs shared; what the example itself does not have."""
    flags = ("--colocate", "--lora-rank", "8", "--freeze-vision-tower", "--num-rollout", "2")
    found = train(task, tmp_path / "run", *flags, "--rollout-batch-size", "4")
    assert max(found["train/log_prob_gap_max"]) < 1e-4
    assert max(found["train/grad_norm"]) > 0
