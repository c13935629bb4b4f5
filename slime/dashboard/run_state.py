"""What a display knows of a running job: gathered from the metrics as they come, drawn elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

STEP_TIME = "perf/step_time"
PHASE_ORDER = ("generate", "train", "update_weights", "eval", "save")


@dataclass(kw_only=True)
class RunState:
    """Everything shown about a run; `update` and `enter`/`leave` are the only ways it changes."""

    run_name: str
    model: str
    layout: str
    start_rollout_id: int
    num_rollout: int
    clock: Callable[[], float] = time.monotonic
    series: dict[str, list[float]] = field(default_factory=dict)  # by metric, one value per update
    current: dict[str, float] = field(default_factory=dict)  # metrics of the rollout under way
    phase_seconds: dict[str, float] = field(default_factory=dict)  # over the whole run
    rollout_seconds: list[float] = field(default_factory=list)
    phase: str | None = None
    phase_started: float = 0.0
    done: int = 0  # rollouts completed by this process

    def enter(self, phase: str) -> None:
        self.phase, self.phase_started = phase, self.clock()

    def leave(self) -> None:
        self.phase = None

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Take metrics in; True when they complete a rollout, which `perf/step_time` says."""
        for name, value in metrics.items():
            number = float(value)
            if math.isfinite(number):
                self.series.setdefault(name, []).append(number)
                self.current[name] = number
        if STEP_TIME not in metrics:
            return False
        for name, seconds in phase_times(metrics).items():
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        self.rollout_seconds.append(float(metrics[STEP_TIME]))
        self.done += 1
        return True

    def start_next(self) -> None:
        self.current = {}

    @property
    def rollouts_done(self) -> int:
        """Of the whole run, with those before a resume."""
        return self.start_rollout_id + self.done

    @property
    def seconds_left(self) -> float | None:
        """From the mean of the last ten rollouts; None before the first is complete."""
        recent = self.rollout_seconds[-10:]
        if not recent:
            return None
        return sum(recent) / len(recent) * (self.num_rollout - self.rollouts_done)

    def eval_names(self) -> list[str]:
        """Reward metrics of the evaluation datasets, such as eval/gsm8k/reward."""
        return sorted(n for n in self.series if n.startswith("eval/") and n.endswith("/reward"))


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """{"generate": 1.2, ...} from perf/generate_time and its like, top-level phases only, in loop order."""
    times = {
        name.removeprefix("perf/").removesuffix("_time"): float(value)
        for name, value in metrics.items()
        if name.startswith("perf/") and name.endswith("_time") and name != STEP_TIME
    }
    times = {name: seconds for name, seconds in times.items() if "/" not in name}
    known = [name for name in PHASE_ORDER if name in times]
    return {name: times[name] for name in known + sorted(set(times) - set(known))}
