"""The state that displays show, collected from metrics as they arrive."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slime.runlog.metric_names import SAMPLES, STEP_TIME, eval_rewards

PHASE_ORDER = ("start", "generate", "train", "update_weights", "eval", "save")


@dataclass(kw_only=True)
class RunState:
    """Everything shown about a run; it changes only through `enter`, `leave` and `update`."""

    run_name: str
    model: str
    layout: str
    num_rollout: int | None  # None: not known yet
    clock: Callable[[], float] = time.monotonic
    rollouts_done: int = 0  # of the whole run, with those before a resume
    latest: dict[str, float] = field(default_factory=dict)  # the newest update
    series: dict[str, list[float]] = field(default_factory=dict)  # by metric, one value per update
    phase_seconds: dict[str, float] = field(default_factory=dict)  # over this process's rollouts
    rollout_seconds: list[float] = field(default_factory=list)  # one per rollout of this process
    phase: str | None = None
    phase_started: float = 0.0

    def enter(self, phase: str) -> None:
        self.phase, self.phase_started = phase, self.clock()

    def leave(self) -> None:
        self.phase = None

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Add metrics; return False if they are from before the first rollout (start, evaluation)."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self.latest = {name: n for name, n in numbers.items() if math.isfinite(n)}
        for name, value in self.latest.items():
            self.series.setdefault(name, []).append(value)
        if "rollout_id" in self.latest:
            self.rollouts_done = int(self.latest["rollout_id"]) + 1
        if SAMPLES not in metrics and not any(name.startswith("train/") for name in metrics):
            return False
        for name, seconds in phase_times(self.latest).items():
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        self.rollout_seconds.append(self.latest.get(STEP_TIME, 0.0))
        return True

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the mean of the last ten rollouts; None before the first one."""
        recent = self.rollout_seconds[-10:]
        if not recent or self.num_rollout is None:
            return None
        return sum(recent) / len(recent) * (self.num_rollout - self.rollouts_done)

    def evals(self) -> dict[str, str]:
        """Return the metric of each dataset: {"gsm8k": "eval/gsm8k/reward"}."""
        return eval_rewards(self.series)


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return {"generate": 1.2, ...} from perf/generate_time etc.: top-level phases in loop order."""
    times = {
        name.removeprefix("perf/").removesuffix("_time"): float(value)
        for name, value in metrics.items()
        if name.startswith("perf/") and name.endswith("_time") and name != STEP_TIME
    }
    times = {name: seconds for name, seconds in times.items() if "/" not in name}
    known = [name for name in PHASE_ORDER if name in times]
    return {name: times[name] for name in known + sorted(set(times) - set(known))}
