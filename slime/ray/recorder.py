"""What a run tells its user: phases as they happen, metrics once per rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime.dashboard.live import LiveDisplay
from slime.utils.arguments import Args
from slime.utils.timer import Timer
from slime.utils.tracking import Tracker

_KINDS = ("rollout", "train", "eval", "perf")


class Recorder:
    """Clock, display and tracker behind one phase() and one log()."""

    def __init__(self, args: Args):
        self._timer = Timer()
        self._tracker = Tracker(args, args.run_dir)
        self._display = LiveDisplay(args)
        self._metrics: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._timer.phase(name), self._display.phase(name):
            yield

    def add(self, metrics: dict[str, float]) -> None:
        """Keep metrics for the next log()."""
        self._metrics.update(metrics)

    def log(self, rollout_id: int, *, times_as: str = "perf") -> None:
        """One line per kind of metric; the times cover everything since the previous log."""
        self._metrics.update(self._timer.take())
        for kind in _KINDS:
            values = {k: v for k, v in self._metrics.items() if k.startswith(f"{kind}/")}
            if values:
                name = times_as if kind == "perf" else kind
                self._tracker.log(values, rollout_id=rollout_id, kind=name)
        self._display.update({"rollout_id": rollout_id, **self._metrics})
        self._metrics = {}

    def message(self, text: str) -> None:
        self._display.message(text)

    def close(self) -> None:
        self._display.close()
        self._tracker.close()
