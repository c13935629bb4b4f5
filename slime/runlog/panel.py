"""The display on a terminal: one panel redrawn in place, messages scrolling above it."""

from __future__ import annotations

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
from slime.runlog.run_state import RunState
from slime.utils.printable import printable, safe_text

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
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def show_start(self) -> None:
        """The panel draws itself from the state."""

    def show_rollout(self) -> None:
        """The panel draws itself from the state."""

    def message(self, text: str) -> None:
        self._live.console.print(Text(safe_text(text)))

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        # Runs on rich's refresh thread, where an exception would silently stop the redrawing.
        try:
            return render_panel(self._state, self._spinner, self._live.console.width)
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
        cells.append(_progress_bar(done, total, max(10, width // 3)))
    if state.seconds_left is not None:
        cells.append(Text(f"{duration(state.seconds_left)} left", style="dim"))
    if state.phase:
        elapsed = state.clock() - state.phase_started
        phase = Text.assemble(state.phase.replace("_", " "), (f" {duration(elapsed)}", "dim"))
        spinner.update(text=phase)
        cells.append(spinner)
    grid.add_row(*cells)
    return grid


def _progress_bar(done: int, total: int, width: int) -> ProgressBar:
    return ProgressBar(
        total=total, completed=done, width=width, complete_style="green", finished_style="green"
    )


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
