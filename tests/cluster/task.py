"""Command lines of the quickstart's task over three hosts: TP2 x DP2 on two of them, engines on the third."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import runs

_START_S = 400
ACROSS = {
    "train_backend": "megatron",
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "actor_num_nodes": 2,
    "actor_num_gpus_per_node": 2,
    "rollout_num_gpus": 1,
    "num_gpus_per_node": 2,
}


@dataclass(kw_only=True, frozen=True)
class Task:
    model: Path
    train: Path
    heldout: Path

    def command(self, run_dir: Path, **overrides: object) -> list[str]:
        flags = {
            **ACROSS,
            "input_key": "prompt",
            "label_key": "answer",
            "apply_chat_template": True,
            "custom_rm_path": "tests.e2e.rewards.dense",
            "num_rollout": 2,
            **overrides,
        }
        return runs.command(self.model, self.train, run_dir, **flags)


def wait_for_rollout(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Until a first rollout is done and the next one begun; on busy cores a start takes minutes."""
    log = run_dir / "metrics.jsonl"
    runs.wait_for(
        lambda: log.exists() and '"kind":"perf"' in log.read_text(), process, timeout=_START_S
    )
