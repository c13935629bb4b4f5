"""Read a run folder: the data of the report and of the closing summary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime.core.errors import UserError
from slime.runlog.jsonl import read_lines
from slime.runlog.metric_names import STEP_TIME, eval_rewards
from slime.runlog.run_folder import ENVIRONMENT_FILE, RESOLVED_FILE
from slime.runlog.run_state import phase_times
from slime.runlog.sample_log import SampleRow, read_samples
from slime.runlog.tracking import METRICS_FILE, RESUMES_FILE

Point = tuple[int, float]  # (rollout_id, value)
_RECORD_KEYS = ("rollout_id", "kind", "time")


@dataclass(kw_only=True, frozen=True)
class RunData:
    """What a run has recorded so far. Series hold (rollout_id, value) in logging order."""

    run_dir: Path
    series: dict[str, list[Point]]
    phases: list[tuple[int, dict[str, float]]]  # seconds per phase of each rollout
    rollout_seconds: list[float]  # of each rollout, phases and what lies between them
    samples: list[tuple[int, SampleRow]]
    config: dict[str, Any]
    origins: dict[str, str]
    starts: list[dict[str, Any]]
    resumed_at: list[int]
    first_time: float | None
    last_time: float | None

    def eval_datasets(self) -> list[str]:
        return list(eval_rewards(self.series))

    def eval_reward(self, dataset: str) -> list[Point]:
        return self.series[f"eval/{dataset}/reward"]

    def rollouts(self) -> int:
        """Return the number of rollouts that were trained on."""
        return len({rollout_id for rollout_id, _ in self.phases})

    def seconds(self) -> float:
        """Return the running time, including starts, without pauses between a crash and a resume."""
        return sum(seconds for _, seconds in self.series.get(STEP_TIME, []))

    def total(self, name: str) -> float:
        return sum(value for _, value in self.series.get(name, []))


def read_run(run_dir: str | Path) -> RunData:
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not a folder. Name the folder of a run, such as runs/quickstart."
        )
    records = [record for record in read_lines(run_dir / METRICS_FILE) if _is_metrics(record)]
    rollouts = [record for record in records if record["kind"] == "perf"]
    resolved = _read_yaml(run_dir / RESOLVED_FILE)
    environment = run_dir / ENVIRONMENT_FILE
    times = [record["time"] for record in records]
    return RunData(
        run_dir=run_dir,
        series=_series(records),
        phases=[
            (r["rollout_id"], phase_times(_numbers(r))) for r in records if r["kind"] == "perf"
        ],
        rollout_seconds=[r[STEP_TIME] for r in rollouts if r.get(STEP_TIME)],
        samples=read_samples(run_dir),
        config={name: entry["value"] for name, entry in resolved.items()},
        origins={name: entry["origin"] for name, entry in resolved.items()},
        starts=json.loads(environment.read_text())["starts"] if environment.exists() else [],
        resumed_at=[
            start
            for record in read_lines(run_dir / RESUMES_FILE)
            if isinstance(start := record.get("start_rollout_id"), int)
        ],
        first_time=min(times, default=None),
        last_time=max(times, default=None),
    )


def _is_metrics(record: dict[str, Any]) -> bool:
    """Skip lines with other types than a run writes: the folder may come from elsewhere."""
    rollout_id, kind, when = (record.get(key) for key in _RECORD_KEYS)
    return isinstance(rollout_id, int) and isinstance(kind, str) and isinstance(when, int | float)


def _series(records: list[dict[str, Any]]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for record in records:
        for name, value in _numbers(record).items():
            series.setdefault(name, []).append((record["rollout_id"], value))
    return series


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a record without null, which stands for NaN and infinity."""
    return {
        name: value
        for name, value in record.items()
        if name not in _RECORD_KEYS and isinstance(value, int | float)
    }


def _read_yaml(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
