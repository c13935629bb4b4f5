"""What a run tells its user: phases as they happen, metrics once per rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime.config.arguments import Args
from slime.diagnosis.stall import PhaseDeadline
from slime.runlog.flops import peak_flops, throughput_metrics
from slime.runlog.live import LiveDisplay
from slime.runlog.timer import Timer
from slime.runlog.tracking import Tracker
from slime.utils.machine import gpus

_LEARNING = ("rollout", "train")


class Recorder:
    """Clock, display and tracker behind one phase() and one log()."""

    def __init__(self, args: Args):
        self._timer = Timer()
        self._tracker = Tracker(args, args.run_dir)
        self._display = LiveDisplay(args)
        self.deadline = PhaseDeadline(args)
        self._metrics: dict[str, float] = {}
        self.failed_phase: str | None = None  # the outermost one that an error left
        cards = gpus()
        train_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
        self._gpus = {
            "train_gpus": train_gpus,
            "num_gpus": train_gpus + (0 if args.colocate else args.rollout_num_gpus),
            "peak_flops": peak_flops(cards[0].name) if cards else None,
        }

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.failed_phase = None
        try:
            with self._timer.phase(name), self._display.phase(name), self.deadline.enter(name):
                yield
        except BaseException:
            self.failed_phase = name
            raise

    def add(self, metrics: dict[str, float]) -> None:
        """Keep metrics for the next log()."""
        self._metrics.update(metrics)

    def log_learning(self, rollout_id: int) -> None:
        """What was learned from the rollout, one line per kind, before a checkpoint counts it as done."""
        self._write(rollout_id, {k: v for k, v in self._metrics.items() if _kind(k) in _LEARNING})

    def log(self, rollout_id: int, *, starting: bool = False) -> None:
        """The rest: evaluation, and times since the previous call.

        What belongs to the start of a run, and so comes again when it is resumed, is of kind "start".
        """
        self._metrics.update(self._timer.take())
        self._metrics.update(throughput_metrics(self._metrics, **self._gpus))
        rest = {k: v for k, v in self._metrics.items() if _kind(k) not in _LEARNING}
        self._write(rollout_id, rest, perf_as="start" if starting else "perf")
        self._display.update({"rollout_id": rollout_id, **self._metrics})
        self._metrics = {}

    def message(self, text: str) -> None:
        self._display.message(text)

    def close(self) -> None:
        self._display.close()
        self._tracker.close()

    def _write(self, rollout_id: int, metrics: dict[str, float], perf_as: str = "perf") -> None:
        by_kind: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            kind = _kind(name)
            by_kind.setdefault(perf_as if kind == "perf" else kind, {})[name] = value
        for kind, values in by_kind.items():
            self._tracker.log(values, rollout_id=rollout_id, kind=kind)


def _kind(name: str) -> str:
    """`rollout`, `train`, `eval` or `perf`: the part before the slash."""
    return name.split("/", 1)[0]
