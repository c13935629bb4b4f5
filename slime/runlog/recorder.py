"""What a run shows its user: phases as they happen, metrics once per rollout.

The display is a live panel on a terminal and one line per rollout elsewhere. It never ends a run: if
drawing fails, the error is logged and the display is turned off.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from slime.config.arguments import Args
from slime.config.env import read_env
from slime.core.types import Activity, TrainReport
from slime.diagnosis.stall import PhaseDeadline
from slime.runlog import metric_names as names
from slime.runlog.event_log import MAX_RANKS, EventLog
from slime.runlog.format import duration, layout, model_name, number, score
from slime.runlog.live.findings import (
    Evidence,
    entropy,
    equal_groups,
    gradient,
    repeated_prompts,
)
from slime.runlog.live.metric_store import MetricStore
from slime.runlog.live.sample_store import SampleStore
from slime.runlog.panel import PanelDisplay, RunState
from slime.runlog.perf_metrics import Timer, peak_flops, throughput_metrics
from slime.runlog.token_log import TokenLog, rollout_name, trained_columns
from slime.runlog.tracking import Tracker
from slime.utils.machine import gpus
from slime.utils.printable import printable, safe_text

logger = logging.getLogger(__name__)

_LEARNING = ("rollout", "train")
_MIN_ROLLOUTS = 5  # before a run warns that nothing is learned


class Recorder:
    """Clock, display and tracker behind one phase() and one log()."""

    def __init__(self, args: Args):
        self._timer = Timer()
        self._tracker = Tracker(args, args.run_dir)
        self._events, self._tokens = EventLog(args.run_dir), TokenLog(args.run_dir)
        self.event("start", host=socket.gethostname(), pid=os.getpid())
        self._display = LiveDisplay(args)
        self._warnings = LearningWarnings(args.run_dir, args.to_dict())
        self.deadline = PhaseDeadline(args)
        self._metrics: dict[str, float] = {}
        self.failed_phase: str | None = None  # the outermost phase that raised
        cards = gpus()
        train_gpus = args.num_training_gpus
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

    def add_trained(self, rollout_id: int, reports: Mapping[str, Sequence[TrainReport]]) -> None:
        """Keep the ranks' reports by model: metrics of the first rank, tokens and activity of all."""
        for name, ranks in reports.items():
            self.add(ranks[0].metrics)
            activities = [report.activity for report in ranks[:MAX_RANKS]]
            self.add_activities({f"{name}_{rank}": a for rank, a in enumerate(activities)})
        tokens = [row for report in reports["trainer"] for row in report.tokens]
        self._tokens.write(rollout_name(rollout_id, trainer=True), trained_columns(tokens))

    def add_activities(self, by_process: dict[str, Activity]) -> None:
        self._events.activities(by_process)

    def log_learning(self, rollout_id: int) -> None:
        """Log what was learned from the rollout, one line per kind, before a checkpoint counts it as done."""
        self._metrics = names.name_stale_gap(self._metrics)
        self._write(rollout_id, {k: v for k, v in self._metrics.items() if _kind(k) in _LEARNING})

    def log(self, rollout_id: int, *, starting: bool = False) -> None:
        """Log all other metrics: evaluation, and times since the previous call.

        Times of the start of a run, which every resume repeats, are of kind "start".
        """
        self._metrics.update(self._timer.take())
        self._metrics.update(throughput_metrics(self._metrics, **self._gpus))
        rest = {k: v for k, v in self._metrics.items() if _kind(k) not in _LEARNING}
        self._write(rollout_id, rest, perf_as="start" if starting else "perf")
        self._display.update({"rollout_id": rollout_id, **self._metrics})
        self._metrics = {}
        self._warn_of_learning()
        self.add_activities({"driver": self._timer.activity()})

    def _warn_of_learning(self) -> None:
        try:
            for text in self._warnings.new():
                self.message(f"warning: {text}")
        except Exception:  # a check of the run never ends it
            logger.warning("the checks of what is learned failed", exc_info=True)

    def message(self, text: str, kind: str = "note") -> None:
        """Tell the user, and record it as an event of this kind."""
        self._display.message(text)
        self.event("warning" if text.startswith("warning") else kind, text)

    def event(self, kind: str, text: str = "", **values: object) -> None:
        self._events.event(kind, text, **values)

    def end(self, outcome: str, reason: str = "") -> None:
        """Record the end, "complete", "stopped" or "failed": a run that was killed has none."""
        self.add_activities({"driver": self._timer.activity()})
        self.event("end", reason, outcome=outcome)

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
    """Return `rollout`, `train`, `eval` or `perf`: the part before the slash."""
    return name.split("/", 1)[0]


class LearningWarnings:
    """Warns a run when a check of `live/findings.py` says that nothing or little can be learned."""

    def __init__(self, run_dir: str | Path, config: dict[str, Any]) -> None:
        self._metrics, self._samples = MetricStore(Path(run_dir)), SampleStore(Path(run_dir))
        self._config, self._seen = config, set[str]()

    def new(self) -> list[str]:
        """Return the findings that are new since the previous call, as text."""
        self._metrics.update()
        self._samples.update()
        evidence = Evidence(metrics=self._metrics, samples=self._samples, config=self._config)
        found = [repeated_prompts(evidence)]
        if len(self._metrics.values(names.REWARD)) >= _MIN_ROLLOUTS:
            later = [check(evidence) for check in (equal_groups, entropy, gradient)]
            found += [finding for finding in later if finding and finding.level == "problem"]
        held = {
            finding.metrics[0] if finding.metrics else finding.title: finding
            for finding in found
            if finding
        }
        texts = [f"{one.title}. {one.text}" for key, one in held.items() if key not in self._seen]
        self._seen = set(held)
        return texts


_SHORT_PHASES = {"generate": "gen", "update_weights": "sync"}
# label, metric, width of the value; "eval" stands for the mean over the evaluation datasets
_COLUMNS = (
    ("reward", names.REWARD, 6),
    ("eval", "eval", 6),
    ("len", names.RESPONSE_LEN, 6),
    ("tok/s", names.TOKENS_PER_SECOND, 7),
    ("gap", names.LOG_PROB_GAP, 7),
    ("loss", names.LOSS, 8),
)


class LiveDisplay:
    """Display of a run::

    display = LiveDisplay(args)
    with display.phase("generate"):
        ...
    display.update({"rollout_id": 0, "rollout/reward_mean": 0.4, **timer.take()})  # once per rollout
    display.close()
    """

    def __init__(self, args: Args, console: Console | None = None) -> None:
        console = console or RunConsole()
        self._state = RunState(
            run_name=printable(Path(args.run_dir).name),
            model=printable(model_name(args.hf_checkpoint)),
            layout=layout(
                trainers=0 if args.debug_rollout_only else args.num_training_gpus,
                rollout=args.rollout_num_gpus,
                colocate=args.colocate,
                backend=args.train_backend,
                engine=args.rollout_engine,
            ),
            num_rollout=args.num_rollout,
        )
        live = console.is_terminal and not console.is_dumb_terminal and not read_env().plain_output
        self._drawing: PanelDisplay | PlainDisplay | None = (
            PanelDisplay if live else PlainDisplay
        )(self._state, console)
        self._safely(self._drawing.start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._safely(lambda: self._state.enter(name))
        try:
            yield
        finally:
            self._safely(self._state.leave)

    def update(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a rollout, with its `rollout_id`; before the first one, of the start."""
        self._safely(lambda: self._update(metrics))

    def message(self, text: str) -> None:
        """Print a line above the live panel."""
        drawing = self._drawing
        self._safely(
            lambda: drawing.message(text) if drawing else print(safe_text(text), flush=True)
        )

    def close(self) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            self._safely(drawing.stop)

    def _update(self, metrics: Mapping[str, float]) -> None:
        is_rollout = self._state.update(metrics)
        if self._drawing is not None:
            self._drawing.show(is_rollout)

    def _safely(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            drawing, self._drawing = self._drawing, None
            if drawing is not None:
                with suppress(Exception):  # restore the terminal
                    drawing.stop()
            logger.warning("the display failed and is off; the run continues", exc_info=True)


class RunConsole(Console):
    """A console that survives a closed pipe; rich would exit the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of this output is gone")


class PlainDisplay:
    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console

    def start(self) -> None:
        state = self._state
        self.message(f"run {state.run_name}  model {state.model}  {state.layout}")

    def show(self, is_rollout: bool) -> None:
        self.message((rollout_line if is_rollout else start_line)(self._state))

    def message(self, text: str) -> None:
        self._console.file.write(f"{safe_text(text)}\n")
        self._console.file.flush()

    def stop(self) -> None:
        """Do nothing: there is no terminal state to restore."""


def start_line(state: RunState) -> str:
    """Format what happened before the first rollout: `start 21s  eval addition 0.120`."""
    parts = [_times(state)]
    parts += [f"{name} {score(state.latest[m])}" for name, m in state.evals().items()]
    return "  ".join(part for part in parts if part)


def rollout_line(state: RunState) -> str:
    """Format `rollout 12/60  reward  0.430  eval  0.400  len    5.1  ...  gen 1.2s train 0.8s`."""
    total = "?" if state.num_rollout is None else str(state.num_rollout)
    parts = [f"rollout {state.rollouts_done:>{len(total)}}/{total}"]
    for label, metric, width in _COLUMNS:
        value = _mean_eval(state) if metric == "eval" else state.latest.get(metric)
        known = bool(state.evals()) if metric == "eval" else metric in state.series
        if value is not None:
            text = score(value) if label in ("reward", "eval") else number(value)
            parts.append(f"{label} {text:>{width}}")
        elif known:
            parts.append(" " * (len(label) + 1 + width))
    if state.latest.get(names.FAILED):
        parts.append(f"failed {number(state.latest[names.FAILED])}")
    parts.append(_times(state))
    if state.seconds_left:
        parts.append(f"left {duration(state.seconds_left)}")
    return "  ".join(parts).rstrip()


def _times(state: RunState) -> str:
    times = {n: duration(s) for n, s in names.phase_times(state.latest).items()}
    rewards = state.latest.get(names.REWARD_TIME, 0.0)
    if rewards > max(1.0, state.latest.get("perf/generate_time", 0.0) / 2):
        times["generate"] = f"{times.get('generate', '')} (rewards {duration(rewards)})"
    return " ".join(f"{_SHORT_PHASES.get(n, n)} {text}" for n, text in times.items())


def _mean_eval(state: RunState) -> float | None:
    """Return the mean reward over datasets if this rollout was evaluated."""
    values = [state.latest[m] for m in state.evals().values() if m in state.latest]
    return sum(values) / len(values) if values else None
