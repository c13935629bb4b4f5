"""The deadline of the phase a run is in (--phase-timeout-minutes)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from slime.config.arguments import Args
from slime.config.flags.run import phase_timeouts


class PhaseDeadline:
    """Knows the current phase, when it began and how long it may take."""

    def __init__(self, args: Args):
        self.limits = phase_timeouts(args.phase_timeout_minutes)  # seconds, by phase
        self.phase: str | None = None
        self._began = 0.0

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Run the clock of a phase; one inside another counts as a part of it."""
        if self.phase is not None or name not in self.limits:
            yield
            return
        self.phase, self._began = name, time.monotonic()
        try:
            yield
        finally:
            self.phase = None

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Return the seconds until the phase is overdue; infinity without one."""
        if self.phase is None:
            return float("inf")
        return max(0.0, self.limits[self.phase] - self.elapsed_s())
