"""What a run tells its user: phases as they happen, metrics once per rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime.dashboard.live import LiveDisplay
from slime.utils.arguments import Args
from slime.utils.flops import peak_flops
from slime.utils.machine import gpus
from slime.utils.throughput import throughput_metrics
from slime.utils.timer import Timer
from slime.utils.tracking import Tracker


class Recorder:
    """Clock, display and tracker behind one phase() and one log()."""

    def __init__(self, args: Args):
        self._timer = Timer()
        self._tracker = Tracker(args, args.run_dir)
        self._display = LiveDisplay(args)
        self._metrics: dict[str, float] = {}
        cards = gpus()
        train_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        self._gpus = {
            "train_gpus": train_gpus,
            "num_gpus": train_gpus + (0 if args.colocate else args.rollout_num_gpus),
            "peak_flops": peak_flops(cards[0].name) if cards else None,
        }

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._timer.phase(name), self._display.phase(name):
            yield

    def add(self, metrics: dict[str, float]) -> None:
        """Keep metrics for the next log()."""
        self._metrics.update(metrics)

    def log(self, rollout_id: int, *, starting: bool = False) -> None:
        """One line per kind of metric, the part of its name before the slash.

        The times cover everything since the previous log. What belongs to the start of a run, and so
        comes again when it is resumed, is of the kind "start".
        """
        self._metrics.update(self._timer.take())
        self._metrics.update(throughput_metrics(self._metrics, **self._gpus))
        by_kind: dict[str, dict[str, float]] = {}
        for name, value in self._metrics.items():
            kind = name.split("/", 1)[0]
            by_kind.setdefault("start" if starting and kind != "eval" else kind, {})[name] = value
        for kind, values in by_kind.items():
            self._tracker.log(values, rollout_id=rollout_id, kind=kind)
        self._display.update({"rollout_id": rollout_id, **self._metrics})
        self._metrics = {}

    def message(self, text: str) -> None:
        self._display.message(text)

    def close(self) -> None:
        self._display.close()
        self._tracker.close()
