"""Seconds per phase of a rollout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.diagnosis.process_status import in_phase


class Timer:
    """Sums the seconds spent in named phases; `take()` returns and resets them.

    A phase inside another carries both names. Three seconds in `phase("train")`, one of them in
    `phase("log_probs")` within it, taken 5 seconds after the previous take::

        {"perf/train_time": 3.0, "perf/train/log_probs_time": 1.0, "perf/step_time": 5.0}

    Each thread nests on its own, so phases of two threads may overlap and exceed `perf/step_time`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds: dict[str, float] = {}
        self._taken_at = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = getattr(self._local, "path", "")
        path = f"{outer}/{name}" if outer else name
        self._local.path = path
        started = self._clock()
        try:
            with in_phase(path):
                yield
        finally:
            self._local.path = outer
            self.add(path, self._clock() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere, such as in another process."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds per phase and in total since the previous take, as metrics."""
        with self._lock:
            now = self._clock()
            metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
            metrics["perf/step_time"] = now - self._taken_at
            self._seconds, self._taken_at = {}, now
        return metrics
