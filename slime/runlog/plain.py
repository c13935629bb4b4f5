"""The display without a terminal: one aligned line per rollout."""

from __future__ import annotations

from rich.console import Console

from slime.runlog import metric_names as names
from slime.runlog.format import duration, number, score
from slime.runlog.run_state import RunState, phase_times
from slime.utils.printable import safe_text

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


class PlainDisplay:
    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console

    def start(self) -> None:
        state = self._state
        self.message(f"run {state.run_name}  model {state.model}  {state.layout}")

    def show_start(self) -> None:
        self.message(start_line(self._state))

    def show_rollout(self) -> None:
        self.message(rollout_line(self._state))

    def message(self, text: str) -> None:
        self._console.file.write(f"{safe_text(text)}\n")
        self._console.file.flush()

    def stop(self) -> None:
        """Nothing is held open."""


def start_line(state: RunState) -> str:
    """`start 21s  eval addition 0.120`: what happened before the first rollout."""
    parts = [_times(state)]
    parts += [f"{name} {score(state.latest[m])}" for name, m in state.evals().items()]
    return "  ".join(part for part in parts if part)


def rollout_line(state: RunState) -> str:
    """`rollout 12/60  reward  0.430  eval  0.400  len    5.1  ...  gen 1.2s train 0.8s sync 0.1s`"""
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
    times = phase_times(state.latest)
    return " ".join(f"{_SHORT_PHASES.get(n, n)} {duration(s)}" for n, s in times.items())


def _mean_eval(state: RunState) -> float | None:
    """The mean over datasets of the evaluation made in this rollout, if there was one."""
    values = [state.latest[m] for m in state.evals().values() if m in state.latest]
    return sum(values) / len(values) if values else None
