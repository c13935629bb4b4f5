"""Each example as a whole run at tiny size, started by its own script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e import runs

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "num_rollout": 2,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 24,
    "rollout_max_context_len": 500,
    "max_tokens_per_gpu": 1024,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
}


@pytest.mark.parametrize("name", ["tool_agent", "search_agent", "multi_agent"])
def test_example_runs_from_its_script(tiny_model, tmp_path, name):
    python = Path(sys.executable)  # the script's python3 is the first on the path
    flags = {
        **TINY,
        "run_dir": tmp_path / "run",
        "save_debug_rollout_data": tmp_path / "{rollout_id}.pt",
    }
    words = [str(part) for k, v in flags.items() for part in ("--" + k.replace("_", "-"), v)]
    done = subprocess.run(
        ["bash", str(EXAMPLES / name / "run.sh"), str(tiny_model), *words],
        env={**runs.environment(forks=True), "PATH": f"{python.parent}:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    train = runs.metrics(tmp_path / "run", "train")
    assert len(train) == 2 and all(abs(r["train/loss"]) < 1e3 for r in train)
    samples = torch.load(tmp_path / "1.pt", weights_only=True)["samples"]
    assert len(samples) == (12 if name == "multi_agent" else 4)
    assert len({s["rollout_id"] for s in samples}) == 4
