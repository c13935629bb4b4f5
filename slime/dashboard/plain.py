"""The display without a terminal: one aligned line per rollout."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from slime.dashboard.format import duration, number
from slime.dashboard.run_state import RunState, phase_times

_SHORT_PHASES = {"generate": "gen", "update_weights": "sync"}
# label, metric, width of the value
_COLUMNS = (
    ("reward", "rollout/reward", 6),
    ("eval", None, 6),
    ("len", "rollout/response_len", 6),
    ("tok/s", "perf/generate_tokens_per_s", 7),
    ("gap", "train/log_prob_gap_max", 7),
    ("loss", "train/loss", 8),
)


class PlainDisplay:
    def __init__(self, state: RunState) -> None:
        self._state = state

    def start(self) -> None:
        state = self._state
        self.message(f"run {state.run_name}  model {state.model}  {state.layout}")

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """An evaluation outside any rollout: the one before training."""
        names = [n for n in self._state.eval_names() if n in metrics]
        values = "  ".join(f"{n.split('/')[1]} {metrics[n]:.3f}" for n in names)
        if values:
            self.message(f"eval before training  {values}")

    def rollout_done(self) -> None:
        self.message(rollout_line(self._state))

    def message(self, text: str) -> None:
        print(text, file=sys.stdout, flush=True)

    def stop(self) -> None:
        """Nothing is held open."""


def rollout_line(state: RunState) -> str:
    """`rollout 12/60  reward  0.430  eval  0.400  len    5.1  ...  gen 1.2s train 0.8s sync 0.1s`"""
    width = len(str(state.num_rollout))
    parts = [f"rollout {state.rollouts_done:>{width}}/{state.num_rollout}"]
    for label, metric, value_width in _COLUMNS:
        value = _last_eval(state) if metric is None else state.current.get(metric)
        if value is not None:
            text = f"{value:.3f}" if label in ("reward", "eval") else number(value)
            parts.append(f"{label} {text:>{value_width}}")
        elif metric is None or metric in state.series:
            parts.append(" " * (len(label) + 1 + value_width))
    times = phase_times(state.current)
    parts.append(" ".join(f"{_SHORT_PHASES.get(n, n)} {duration(s)}" for n, s in times.items()))
    if state.seconds_left:
        parts.append(f"left {duration(state.seconds_left)}")
    return "  ".join(parts).rstrip()


def _last_eval(state: RunState) -> float | None:
    """The mean over datasets of the evaluation made in this rollout, if there was one."""
    values = [state.current[n] for n in state.eval_names() if n in state.current]
    return sum(values) / len(values) if values else None
