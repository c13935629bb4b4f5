"""The display on a terminal: one panel redrawn in place, messages scrolling above it."""

from __future__ import annotations

from collections.abc import Mapping

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime.dashboard.format import duration, number, sparkline
from slime.dashboard.run_state import RunState

# label, metric; a row appears once its metric has come in
_ROWS = (
    ("train reward", "rollout/reward"),
    ("response length", "rollout/response_len"),
    ("tokens/s", "perf/generate_tokens_per_s"),
    ("log-prob gap", "train/log_prob_gap_max"),
    ("grad norm", "train/grad_norm"),
    ("KL to reference", "train/kl_loss"),
    ("entropy", "train/entropy"),
    ("loss", "train/loss"),
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
        self._console = console
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=5, transient=False
        )

    def start(self) -> None:
        self._live.start()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """The panel shows evaluations in its own row."""

    def rollout_done(self) -> None:
        """The panel shows the newest rollout by itself."""

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        # Runs on rich's refresh thread, where an exception would end the redrawing without a word.
        try:
            return render_panel(self._state, self._spinner, self._console.width)
        except Exception as error:
            return Text(f"(display: {error})", style="dim")


def render_panel(state: RunState, spinner: Spinner, width: int) -> RenderableType:
    parts: list[RenderableType] = [_progress(state, spinner, width)]
    table = _metrics(state, width)
    if table.row_count:
        parts += [Rule(style="dim"), table]
    if state.phase_seconds:
        parts += [Rule(style="dim"), _phases(state, width)]
    title = Text.assemble(("slime ", "bold"), (state.run_name, "bold cyan"))
    subtitle = Text(f"{state.model}  ·  {state.layout}", style="dim")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
    )


def _progress(state: RunState, spinner: Spinner, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    done, total = state.rollouts_done, state.num_rollout
    left = state.seconds_left
    status = Text("waiting", style="dim")
    if state.phase:
        status = Text(f"{state.phase.replace('_', ' ')} ", style="bold")
        status.append(duration(state.clock() - state.phase_started), style="dim")
    spinner.update(text=status)
    grid.add_row(
        Text(f"rollout {done}/{total}"),
        ProgressBar(total=max(total, 1), completed=done, width=max(10, width // 3)),
        Text(f"{duration(left)} left" if left is not None else "", style="dim"),
        spinner if state.phase else status,
    )
    return grid


def _metrics(state: RunState, width: int) -> Table:
    spark_width = max(8, min(40, width - 56))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    rows = [(label, state.series[metric]) for label, metric in _ROWS if metric in state.series]
    evals = [
        (f"eval {name.split('/', 1)[1].rsplit('/', 1)[0]}", state.series[name])
        for name in state.eval_names()
    ]
    for label, values in rows[:1] + evals + rows[1:]:
        change = f"{number(values[0])} → {number(values[-1])}" if len(values) > 1 else ""
        table.add_row(label, number(values[-1]), sparkline(values, spark_width), change)
    return table


def _phases(state: RunState, width: int) -> Table:
    """Seconds per phase over the run, as bars on one scale."""
    table = Table.grid(padding=(0, 2))
    total = sum(state.phase_seconds.values()) or 1.0
    bar_width = max(8, min(40, width - 56))
    rollouts = max(state.done, 1)
    for name, seconds in state.phase_seconds.items():
        table.add_row(
            Text(name.replace("_", " ").ljust(15), style="dim"),
            Text(f"{duration(seconds / rollouts)}", style="bold"),
            Bar(total, 0, seconds, width=bar_width, color=_PHASE_STYLES.get(name, "white")),
            Text(f"{100 * seconds / total:.0f}%", style="dim"),
        )
    return table
