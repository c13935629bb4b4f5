"""The state that displays show, and the panel on a terminal, redrawn in place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.runlog import metric_names as names
from slime.runlog.format import duration, number, score, sparkline
from slime.utils.printable import printable, safe_text


@dataclass(kw_only=True)
class RunState:
    """Everything shown about a run; only `enter`, `leave` and `update` change it."""

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
        if names.SAMPLES not in metrics and not any(name.startswith("train/") for name in metrics):
            return False
        for name, seconds in names.phase_times(self.latest).items():
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        self.rollout_seconds.append(self.latest.get(names.STEP_TIME, 0.0))
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
        return names.eval_rewards(self.series)


_LABEL_WIDTH = 17
# label, metric; a row appears once its metric has a value
_ROWS = (
    ("response length", names.RESPONSE_LEN),
    ("tokens/s", names.TOKENS_PER_SECOND),
    ("log-prob gap", names.LOG_PROB_GAP),
    ("grad norm", names.GRAD_NORM),
    ("KL to reference", names.KL),
    ("entropy", names.ENTROPY),
)
_PHASE_STYLES = {
    "generate": "cyan",
    "train": "magenta",
    "update_weights": "yellow",
    "eval": "green",
    "save": "blue",
}


class PanelDisplay:
    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._spinner = Spinner("dots", style="cyan")
        self._stopping = False
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def show(self, is_rollout: bool) -> None:
        """Do nothing: the panel draws itself from the state."""

    def message(self, text: str) -> None:
        self._live.console.print(Text(safe_text(text)))

    def stop(self) -> None:
        self._stopping = True
        self._live.stop()

    def _render(self) -> RenderableType:
        # Runs on rich's refresh thread, where an exception would silently stop the redrawing.
        try:
            panel = render_panel(self._state, self._spinner, self._live.console.width)
            # The cursor waits on an empty line. At the end of a full-width line the echoed ^C would wrap,
            # and the redrawing would begin one line too low and leave the old top border on the screen.
            return panel if self._stopping else Group(panel, "")
        except Exception as error:
            return Text(f"(display: {error})", style="dim")


def render_panel(state: RunState, spinner: Spinner, width: int) -> RenderableType:
    parts: list[RenderableType] = [_progress(state, spinner, width)]
    if state.series:
        parts += [Rule(style="dim"), _metrics(state, width)]
    if state.phase_seconds:
        parts += [Rule(style="dim"), _phases(state, width)]
    return Panel(
        Group(*parts),
        title=Text.assemble(("slime ", "not dim bold green"), (state.run_name, "not dim bold")),
        title_align="left",
        subtitle=Text(f"{state.model} · {state.layout}", style="dim"),
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
    )


def _progress(state: RunState, spinner: Spinner, width: int) -> RenderableType:
    done, total = state.rollouts_done, state.num_rollout
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_LABEL_WIDTH)
    cells: list[RenderableType] = [Text(f"rollout {done}/{total or '?'}", style="bold")]
    if total:
        bar = ProgressBar(
            total, done, max(10, width // 3), complete_style="green", finished_style="green"
        )
        cells.append(bar)
    if state.seconds_left is not None:
        cells.append(Text(f"{duration(state.seconds_left)} left", style="dim"))
    if state.phase:
        elapsed = state.clock() - state.phase_started
        phase = Text.assemble(state.phase.replace("_", " "), (f" {duration(elapsed)}", "dim"))
        spinner.update(text=phase)
        cells.append(spinner)
    grid.add_row(*cells)
    return grid


def _metrics(state: RunState, width: int) -> Table:
    """Draw one line per metric: latest value, sparkline, first and last value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=_LABEL_WIDTH, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", style="bold", no_wrap=True, min_width=7)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    rewards = [("train reward", names.REWARD)]
    rewards += [(f"eval {name}", metric) for name, metric in state.evals().items()]
    for label, metric in [*rewards, *_ROWS]:
        values = state.series.get(metric)
        if values:
            write = score if (label, metric) in rewards else number
            change = f"{write(values[0])} → {write(values[-1])}" if len(values) > 1 else ""
            bars = sparkline(values, _bar_width(width)).ljust(_bar_width(width))
            style = "green" if (label, metric) in rewards else "cyan"
            table.add_row(
                Text(printable(label)), write(values[-1]), Text(bars, style=style), change
            )
    return table


def _phases(state: RunState, width: int) -> Table:
    """Draw the seconds per phase of a rollout as bars on one scale."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=_LABEL_WIDTH, no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True, min_width=7)
    total = sum(state.phase_seconds.values()) or 1.0
    for name, seconds in state.phase_seconds.items():
        color = _PHASE_STYLES.get(name, "white")
        table.add_row(
            Text(printable(name.replace("_", " "))),
            duration(seconds / len(state.rollout_seconds)),
            Bar(total, 0, seconds, width=_bar_width(width), color=color),
            Text(f"{100 * seconds / total:.0f}%", style="dim"),
        )
    return table


def _bar_width(width: int) -> int:
    return max(8, min(40, width - 56))
