"""A run folder as a run of the quickstart's kind would leave it, made without running anything."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import yaml

from slime.runlog.sample_log import SampleRow, append_samples

CONFIG = {
    "hf_checkpoint": ("runs/quickstart/tiny-qwen3", "command line"),
    "prompt_data": (["data/addition.jsonl"], "command line"),
    "train_backend": ("fsdp", "command line"),
    "rollout_batch_size": (16, "command line"),
    "n_samples_per_prompt": (8, "command line"),
    "lr": (3e-4, "command line"),
    "advantage_estimator": ("grpo", "command line"),
    "eval_interval": (5, "config"),
    "wandb_key": ("<redacted>", "command line"),
    "num_rollout": (60, "command line"),
    "global_batch_size": (128, "derived"),
    "rollout_engine": ("slime", "derived"),
    "rollout_num_gpus": (1, "derived"),
    "actor_num_gpus_per_node": (1, "derived"),
    "actor_num_nodes": (1, "default"),
    "colocate": (False, "default"),
    "eps_clip": (0.2, "default"),
    "rollout_temperature": (1.0, "default"),
}


def write_run(
    run_dir: Path, *, rollouts: int = 60, planned: int = 60, groups: int = 16, seed: int = 0
) -> Path:
    """A reward that climbs along a logistic curve, noise of the size 128 samples give, samples to match."""
    rng = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(run_dir, planned)
    clock = time.time() - 4.0 * rollouts
    lines = []

    def log(rollout_id: int, kind: str, metrics: dict[str, float]) -> None:
        lines.append({"rollout_id": rollout_id, "kind": kind, "time": clock, **metrics})

    log(-1, "eval", _evaluation(skill(0), rng))
    log(-1, "start", {"perf/start_time": 14.0, "perf/eval_time": 0.6, "perf/step_time": 14.7})
    for rollout_id in range(rollouts):
        level = skill(rollout_id)
        log(rollout_id, "rollout", _rollout(level, rng))
        append_samples(run_dir, rollout_id, _samples(level, rng, rollout_id, groups))
        log(rollout_id, "train", _train(level, rng))
        perf = {
            "perf/generate_time": rng.gauss(1.25, 0.08),
            "perf/train_time": rng.gauss(0.85, 0.05),
            "perf/update_weights_time": rng.gauss(0.09, 0.01),
        }
        if rollout_id % 5 == 4:
            log(rollout_id, "eval", _evaluation(level, rng))
            perf["perf/eval_time"] = rng.gauss(0.6, 0.05)
        if rollout_id % 20 == 19:
            perf["perf/save_time"] = rng.gauss(0.7, 0.1)
        perf["perf/step_time"] = sum(perf.values()) + 0.05
        perf["perf/rollout_tokens_per_second"] = 128 * 6.1 / perf["perf/generate_time"]
        clock += perf["perf/step_time"]
        log(rollout_id, "perf", perf)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def skill(rollout_id: int) -> float:
    """Chance of a right answer: 0.1 at first, 0.95 in the end."""
    return 0.08 + 0.87 / (1 + math.exp(-(rollout_id - 22) / 6))


def _rollout(level: float, rng: random.Random) -> dict[str, float]:
    reward = sum(rng.random() < level for _ in range(128)) / 128
    length = 4.2 + 2.6 * (1 - level) + rng.gauss(0, 0.15)
    return {
        "rollout/samples": 128,
        "rollout/reward_mean": reward,
        "rollout/response_len_mean": length,
        "rollout/tokens": round(128 * length),
        "rollout/zero_std_groups": round(16 * (level**8 + (1 - level) ** 8)),
        "rollout/truncated": max(0.0, rng.gauss(0.16 * (1 - level), 0.015)),
    }


def _train(level: float, rng: random.Random) -> dict[str, float]:
    return {
        "train/loss": rng.gauss(-0.004, 0.006),
        "train/grad_norm": abs(rng.gauss(0.9 - 0.5 * level, 0.12)),
        "train/lr": 3e-4,
        "train/entropy": 1.35 * (1 - level) + 0.12 + rng.gauss(0, 0.03),
        "train/clip_fraction": max(0.0, rng.gauss(0.03, 0.008)),
        "train/log_prob_gap_max": 10 ** rng.gauss(-6.2, 0.15),
        "train/log_prob_gap_mean": 10 ** rng.gauss(-7.5, 0.1),
    }


def _evaluation(level: float, rng: random.Random) -> dict[str, float]:
    easy = sum(rng.random() < level for _ in range(200)) / 200
    hard = sum(rng.random() < 0.8 * level**1.6 for _ in range(200)) / 200
    return {
        "eval/addition/reward": easy,
        "eval/addition/pass@1": easy,
        "eval/addition_3digits/reward": hard,
    }


def _samples(level: float, rng: random.Random, rollout_id: int, groups: int) -> list[SampleRow]:
    rows = []
    for group in range(groups):
        a, b = rng.randrange(100), rng.randrange(100)
        rights = [rng.random() < level for _ in range(8)]
        mean = sum(rights) / 8
        std = math.sqrt(sum((r - mean) ** 2 for r in rights) / 7)
        for place, right in enumerate(rights):
            answer = a + b if right else rng.randrange(200)
            right = answer == a + b
            rows.append(
                SampleRow(
                    prompt=f"{a} + {b} = ",
                    response=f"{answer}"
                    if right or rng.random() < 0.8
                    else f"{answer}{answer} + <b>{a}",
                    reward=float(right),
                    advantage=(right - mean) / (std + 1e-6) if std else 0.0,
                    status="completed" if right or rng.random() < 0.9 else "truncated",
                    group_index=rollout_id * 16 + group,
                    index=(rollout_id * 16 + group) * 8 + place,
                    prompt_length=len(f"{a} + {b} = "),
                    response_length=len(str(answer)) + 1,
                    label=str(a + b),
                )
            )
    return rows


def make_row(group: int = 0, index: int = 0, **values: object) -> SampleRow:
    """A logged sample; `values` are other fields than by default."""
    fields = {
        "prompt": f"prompt {group}",
        "response": f"response {index}",
        "reward": index % 2,
        "advantage": None,
        "status": "completed",
        "group_index": group,
        "index": index,
        "prompt_length": 3,
        "response_length": 5,
        **values,
    }
    return SampleRow(**fields)  # type: ignore[arg-type]


def write_config(run_dir: Path, planned: int) -> None:
    resolved = {
        name: {"value": value, "origin": origin} for name, (value, origin) in CONFIG.items()
    }
    resolved["num_rollout"]["value"] = planned
    (run_dir / "config_resolved.yaml").write_text(yaml.safe_dump(resolved))
    machine = {
        "time": time.time() - 300,
        "python": "3.12.4",
        "packages": {"torch": "2.13.0", "transformers": "5.22.2", "ray": "2.60.0"},
        "gpus": [],
        "git_commit": "7e6d719a0b3c4d5e6f708192a3b4c5d6e7f80912",
    }
    (run_dir / "environment.json").write_text(json.dumps({"starts": [machine]}))
