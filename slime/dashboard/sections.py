"""The parts of the report, each a record the template writes out; a part without data is None or empty."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from slime.dashboard.charts import Chart, Line, line_chart, stacked_bars
from slime.dashboard.format import count, duration, layout, number
from slime.dashboard.run_data import RunData
from slime.utils.sample_log import SampleRow, evenly

MAX_SAMPLES = 400

# title, metric, logarithmic, what it means
_SMALL_CHARTS = (
    ("Response length", "rollout/response_len", False, "mean tokens per response"),
    ("Train/inference gap", "train/log_prob_gap_max", True, "largest log-prob difference"),
    ("Entropy", "train/entropy", False, "nats per response token"),
    ("Gradient norm", "train/grad_norm", False, "before clipping"),
    ("Loss", "train/loss", False, "mean over optimizer steps"),
    ("KL to the reference", "train/kl_loss", False, "estimate over response tokens"),
    ("Clipped tokens", "train/clip_fraction", False, "share of response tokens"),
    ("Truncated responses", "rollout/truncated_ratio", False, "share at the length limit"),
    ("Generation speed", "perf/generate_tokens_per_s", False, "tokens per second, all engines"),
)


@dataclass(kw_only=True, frozen=True)
class Drawn:
    chart: Chart
    svg: Markup


@dataclass(kw_only=True, frozen=True)
class Learned:
    dataset: str
    first: float
    last: float
    count: int  # evaluations made
    color: int


@dataclass(kw_only=True, frozen=True)
class Header:
    status: str  # "complete", "partial" or "empty"
    status_text: str
    sentence: str
    learned: list[Learned]
    tiles: list[tuple[str, str, str]]  # label, value, remark


@dataclass(kw_only=True, frozen=True)
class PhaseRow:
    name: str
    color: int
    total: float
    mean: float
    share: float


@dataclass(kw_only=True, frozen=True)
class Phases:
    svg: Markup
    rows: list[PhaseRow]


@dataclass(kw_only=True, frozen=True)
class Samples:
    rows: list[tuple[int, SampleRow]]
    rollout_ids: list[int]
    kinds: list[str]
    left_out: int


@dataclass(kw_only=True, frozen=True)
class ConfigRow:
    name: str
    value: str
    origin: str


def header(run: RunData) -> Header:
    status, status_text = _status(run)
    learned = [
        Learned(
            dataset=name, first=points[0][1], last=points[-1][1], count=len(points), color=1 + i % 6
        )
        for i, name in enumerate(run.eval_datasets())
        if (points := run.eval_reward(name))
    ]
    return Header(
        status=status,
        status_text=status_text,
        sentence=_sentence(run),
        learned=learned,
        tiles=_tiles(run),
    )


def reward_chart(run: RunData) -> Drawn | None:
    lines = []
    if points := run.series.get("rollout/reward"):
        lines.append(Line(name="train", points=points, color=0))
    for i, name in enumerate(run.eval_datasets()):
        points = run.eval_reward(name)
        lines.append(Line(name=f"eval {name}", points=points, color=1 + i % 6, markers=True))
    chart = Chart(title="Reward", lines=lines, width=1120, height=300, resumed_at=run.resumed_at)
    return _draw(chart)


def small_charts(run: RunData) -> list[Drawn]:
    charts = [
        Chart(
            title=title,
            help=meaning,
            log=log,
            lines=[Line(name=title, points=run.series[metric])],
            resumed_at=run.resumed_at,
        )
        for title, metric, log, meaning in _SMALL_CHARTS
        if run.series.get(metric)
    ]
    return [drawn for chart in charts if (drawn := _draw(chart))]


def phases(run: RunData) -> Phases | None:
    names = list(dict.fromkeys(name for _, times in run.phases for name in times))
    if not names:
        return None
    colors = {name: place % 7 for place, name in enumerate(names)}
    totals = {name: sum(times.get(name, 0.0) for _, times in run.phases) for name in names}
    everything = sum(totals.values()) or 1.0
    rows = [
        PhaseRow(
            name=name.replace("_", " "),
            color=colors[name],
            total=totals[name],
            mean=totals[name] / len(run.phases),
            share=totals[name] / everything,
        )
        for name in names
    ]
    return Phases(svg=stacked_bars(run.phases, colors, 760, 220), rows=rows)


def samples(run: RunData) -> Samples:
    rows = evenly(run.samples, MAX_SAMPLES)
    return Samples(
        rows=rows,
        rollout_ids=sorted({rollout_id for rollout_id, _ in rows}),
        kinds=sorted({row.kind for _, row in rows}),
        left_out=len(run.samples) - len(rows),
    )


def config(run: RunData) -> dict[str, list[ConfigRow]]:
    """Rows by what a reader looks for: what was set, what followed from it, what was left alone."""
    parts: dict[str, list[ConfigRow]] = {"set": [], "derived": [], "default": []}
    for name in sorted(run.config):
        origin = run.origins[name]
        part = origin if origin in parts else "set"
        value = run.config[name]
        text = value if isinstance(value, str) else json.dumps(value)
        parts[part].append(ConfigRow(name=name, value=text, origin=origin))
    return parts


def starts(run: RunData) -> list[tuple[str, str]]:
    """(when, on what) for each start of the run."""
    return [(_date(start["time"]), _machine(start)) for start in run.starts]


def _draw(chart: Chart) -> Drawn | None:
    return Drawn(chart=chart, svg=line_chart(chart)) if chart.lines else None


def _status(run: RunData) -> tuple[str, str]:
    done, wanted = run.rollouts(), run.config.get("num_rollout")
    if done == 0:
        return "empty", "nothing recorded yet"
    if wanted is None:
        return "partial", f"{done} rollouts"
    if done >= wanted:
        return "complete", f"complete, {done} rollouts"
    return "partial", f"{done} of {wanted} rollouts"


def _sentence(run: RunData) -> str:
    done = run.rollouts()
    if done == 0 and not run.eval_datasets():
        return "This run has recorded no metrics yet. Build the report again once it has."
    after = f"after {done} rollout{'s' if done != 1 else ''}" if done else "before training"
    changes = []
    for name in run.eval_datasets():
        points = run.eval_reward(name)
        first, last = number(points[0][1]), number(points[-1][1])
        if len(points) == 1:
            changes.append(f"{name}: {first}")
        else:
            verb = "rose" if points[-1][1] > points[0][1] else "went"
            changes.append(f"{name} {verb} from {first} to {last}")
    if changes:
        return f"Mean reward on held-out prompts {after}: {'; '.join(changes)}."
    if points := run.series.get("rollout/reward"):
        return (
            f"Training reward went from {number(points[0][1])} to {number(points[-1][1])} {after}; "
            "no evaluation was run (--eval-interval, --eval-prompt-data)."
        )
    return f"{done} rollouts are recorded, without a reward."


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
    tiles = [("Rollouts", str(run.rollouts()), f"of {run.config.get('num_rollout', '?')}")]
    if tokens := run.total("rollout/response_tokens"):
        tiles.append(("Response tokens", count(tokens), "generated for training"))
    if seconds := run.seconds():
        tiles.append(
            ("Time", duration(seconds), f"{duration(seconds / max(run.rollouts(), 1))} a rollout")
        )
    if points := run.series.get("perf/generate_tokens_per_s"):
        mean = sum(value for _, value in points) / len(points)
        tiles.append(("Generation", f"{count(mean)}/s", "tokens, mean over rollouts"))
    if points := run.series.get("train/log_prob_gap_max"):
        worst = max(value for _, value in points)
        tiles.append(("Largest log-prob gap", number(worst), "trainer against engine"))
    if run.config:
        model = str(run.config.get("hf_checkpoint") or "-").rstrip("/").rsplit("/", 1)[-1]
        tiles.append(("Model", model, _layout(run.config)))
    return tiles


def _layout(config: dict[str, Any]) -> str:
    needed = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "colocate")
    if any(config.get(name) is None for name in needed):
        return ""
    return layout(
        trainers=config["actor_num_nodes"] * config["actor_num_gpus_per_node"],
        rollout=config["rollout_num_gpus"],
        colocate=config["colocate"],
        backend=config.get("train_backend", ""),
        engine=config.get("rollout_engine", ""),
    )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _machine(start: dict[str, Any]) -> str:
    gpus = [gpu["name"] for gpu in start.get("gpus", [])]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    packages = start.get("packages", {})
    versions = ", ".join(
        f"{n} {packages[n]}" for n in ("torch", "transformers", "ray") if n in packages
    )
    commit = start.get("git_commit")
    place = f"{device}, Python {start.get('python', '?')}, {versions}"
    return f"{place}, commit {commit[:12]}" if commit else place
