"""A run folder of 10,000 rollouts and a million samples, written without running anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson

from slime.runlog.sample_table import SAMPLE_DTYPE, STATUSES, prompt_hash
from tests.synthetic_run import write_config

START = 1_790_000_000.0
_STEP = 6.0  # seconds of a rollout
_GROUP = 10


def write_huge_run(
    run_dir: Path, *, rollouts: int = 10_000, samples: int = 100, texts: int = 8
) -> Path:
    """Metrics of 40 names, `samples` rows a rollout of which `texts` have a line, a timeline, an end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(run_dir, rollouts)
    rng = np.random.default_rng(0)
    _write_metrics(run_dir, rollouts, rng)
    table = _table(rollouts, samples, rng)
    _write_texts(run_dir, table, samples, texts)
    (run_dir / "samples.table").write_bytes(table.tobytes())
    header = {"format": 1, "datasets": ["train"], "statuses": STATUSES, "dtype": []}
    (run_dir / "samples.table.json").write_text(json.dumps(header))
    _write_timeline(run_dir, rollouts)
    return run_dir


def skill(rollouts: int) -> np.ndarray:
    return 0.1 + 0.85 * np.arange(rollouts) / rollouts


def _write_metrics(run_dir: Path, rollouts: int, rng: np.random.Generator) -> None:
    level, noise = skill(rollouts), rng.normal(size=(rollouts, 20))
    with (run_dir / "metrics.jsonl").open("wb") as file:
        for r in range(rollouts):
            end = START + _STEP * (r + 1)
            head = {"rollout_id": r, "time": end}
            rollout = {
                "rollout/reward_mean": float(level[r] + 0.03 * noise[r, 0]),
                "rollout/samples": 100.0,
                "rollout/failed": 0.0,
                "rollout/tokens": 1000.0,
                "rollout/truncated": 0.05,
                "rollout/zero_std_groups": 2.0,
            }
            train = {f"train/metric_{n}": float(noise[r, n]) for n in range(20)}
            train |= {"train/loss": 0.01, "train/entropy": 0.5, "train/grad_norm": 0.4}
            perf = {f"perf/part_{n}_time": 0.5 for n in range(8)} | {"perf/step_time": _STEP}
            for kind, values in (("rollout", rollout), ("train", train), ("perf", perf)):
                file.write(orjson.dumps({**head, "kind": kind, **values}) + b"\n")


def _table(rollouts: int, samples: int, rng: np.random.Generator) -> np.ndarray:
    count = rollouts * samples
    table = np.zeros(count, SAMPLE_DTYPE)
    table["rollout_id"] = np.repeat(np.arange(rollouts), samples)
    table["index"] = table["trajectory"] = np.arange(count)
    table["group"] = np.arange(count) // _GROUP
    table["status"] = np.where(rng.random(count) < 0.05, 2, 1)  # truncated, completed
    table["reward"] = rng.random(count) < np.repeat(skill(rollouts), samples)
    table["advantage"] = table["reward"] - 0.5
    table["prompt"] = np.array([prompt_hash(f"prompt {n}") for n in range(1000)], np.uint64)[
        table["group"] % 1000
    ]
    table["prompt_len"], table["response_len"] = 9, rng.integers(1, 200, count)
    table["trained_len"] = table["response_len"]
    table["text"] = -1
    return table


def _write_texts(run_dir: Path, table: np.ndarray, samples: int, texts: int) -> None:
    offset = 0
    with (run_dir / "samples.jsonl").open("wb") as file:
        for row in range(0, len(table), samples):
            for n in range(row, row + texts):
                line = orjson.dumps(_line(table[n], n)) + b"\n"
                table["text"][n] = offset
                offset += len(line)
                file.write(line)


def _line(record: np.void, n: int) -> dict[str, object]:
    return {
        "rollout_id": int(record["rollout_id"]),
        "prompt": f"prompt {int(record['group']) % 1000}",
        "response": f"answer of sample {n} " * 20,
        "reward": float(record["reward"]),
        "advantage": float(record["advantage"]),
        "status": STATUSES[record["status"]],
        "group_index": int(record["group"]),
        "index": n,
        "prompt_length": 9,
        "response_length": int(record["response_len"]),
        "label": None,
        "kind": "train",
    }


def _write_timeline(run_dir: Path, rollouts: int) -> None:
    with (run_dir / "timeline.jsonl").open("wb") as file:
        for r in range(rollouts):
            at = START + _STEP * r
            spans = {
                "driver": [["generate", at, at + 3], ["train", at + 3, at + 5]],
                "rollout": [["generate", at, at + 3]],
                "trainer_0": [["train/steps", at + 3.2, at + 5]],
            }
            for process, found in spans.items():
                record = {"process": process, "spans": found, "memory": {"rss": 10**9 + r}}
                file.write(orjson.dumps(record) + b"\n")
    events = [
        {"time": START, "kind": "start", "text": ""},
        {"time": START + _STEP * rollouts, "kind": "end", "text": "", "outcome": "complete"},
    ]
    (run_dir / "events.jsonl").write_bytes(b"".join(orjson.dumps(e) + b"\n" for e in events))
