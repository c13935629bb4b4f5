"""The sections of the report as records for the template; one without data is None or empty."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from slime.runlog import metric_names as names
from slime.runlog.format import count, duration, layout_of, model_name, number, score
from slime.runlog.live.findings import findings
from slime.runlog.live.metric_store import MetricStore
from slime.runlog.live.sample_store import SampleStore
from slime.runlog.report.charts import Chart, Line, stacked_bars
from slime.runlog.run_folder import RunData
from slime.runlog.sample_log import SampleRow, evenly, read_thumbnails

MAX_SAMPLES = 400

# title, metric, logarithmic, what it means
SMALL_CHARTS = (
    ("Response length", names.RESPONSE_LEN, False, "mean tokens per response"),
    ("Log-prob gap", names.LOG_PROB_GAP, True, "largest, trainer against engine"),
    ("Staleness gap", names.STALE_GAP, True, "largest, from generating to training"),
    ("Entropy", names.ENTROPY, False, "nats per response token"),
    ("Loss", names.LOSS, False, "mean over optimizer steps"),
    ("Gradient norm", names.GRAD_NORM, False, "before clipping"),
    ("Generation speed", names.TOKENS_PER_SECOND, False, "tokens per second, all engines"),
    ("Groups without signal", names.ZERO_STD_GROUPS, False, "rewards all equal"),
    ("Truncated responses", names.TRUNCATED, False, "share at the length limit"),
    ("Clipped tokens", names.CLIP_FRACTION, False, "share of response tokens"),
    ("KL to the reference", names.KL, False, "estimate over response tokens"),
)


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
    chart: Markup
    rows: list[PhaseRow]


@dataclass(kw_only=True, frozen=True)
class Samples:
    rows: list[tuple[int, SampleRow]]
    rollout_ids: list[int]
    kinds: list[str]
    labels: bool  # some row has one
    left_out: int
    run_dir: Path

    def images(self, row: SampleRow) -> list[str]:
        """Return thumbnails of the row's images as data URIs."""
        return read_thumbnails(self.run_dir, row.images)


@dataclass(kw_only=True, frozen=True)
class ConfigRow:
    name: str
    value: str
    origin: str


def header(run: RunData) -> Header:
    state, status_text = status(run)
    learned = [
        Learned(
            dataset=name, first=points[0][1], last=points[-1][1], count=len(points), color=1 + i % 6
        )
        for i, name in enumerate(run.eval_datasets())
        if (points := run.eval_reward(name))
    ]
    return Header(
        status=state,
        status_text=status_text,
        sentence=_sentence(run),
        learned=learned,
        tiles=_tiles(run),
    )


def reward_chart(run: RunData) -> Chart | None:
    lines = []
    keys = [run.config.get(name) for name in ("reward_key", "eval_reward_key")]
    # Two components of a dictionary are two quantities: each line says which one it is.
    trained, evaluated = (f" ({key})" if key and keys[0] != keys[1] else "" for key in keys)
    if points := run.series.get(names.REWARD):
        lines.append(Line(name=f"train{trained}", points=points, color=0))
    for i, name in enumerate(run.eval_datasets()):
        points = run.eval_reward(name)
        label = f"eval {name}{evaluated}"
        lines.append(Line(name=label, points=points, color=1 + i % 6, markers=True))
    if not lines:
        return None
    return Chart(title="Reward", lines=lines, height=300, resumed_at=run.resumed_at)


def small_charts(run: RunData) -> list[Chart]:
    return [
        Chart(
            title=title,
            help=meaning + _out_of(run, metric),
            log=log,
            lines=[Line(name=title, points=run.series[metric])],
            resumed_at=run.resumed_at,
        )
        for title, metric, log, meaning in SMALL_CHARTS
        if run.series.get(metric)
    ]


def _out_of(run: RunData, metric: str) -> str:
    groups = run.config.get("rollout_batch_size")
    return f", of {groups} groups" if metric == names.ZERO_STD_GROUPS and groups else ""


def stands_out(run: RunData) -> list[dict[str, Any]]:
    """Return the findings of the live page that are not fine, problems first."""
    metrics, samples = MetricStore(run.run_dir), SampleStore(run.run_dir)
    metrics.update()
    samples.update()
    return [found for found in findings(metrics, samples, run.config) if found["level"] != "fine"]


def component_charts(run: RunData) -> list[Chart]:
    """Return one chart of the components of dictionary rewards for training, and one per dataset."""
    lines: dict[str, list[Line]] = {}
    for name in filter(names.is_component, run.series):
        kind, _, key = name.partition("/reward/")
        color = len(lines.setdefault(kind, [])) % 7
        marked = kind != "rollout"
        line = Line(name=key, points=run.series[name], color=color, markers=marked)
        lines[kind].append(line)
    return [
        Chart(
            title=f"Reward components, {'train' if kind == 'rollout' else kind.replace('/', ' ')}",
            lines=drawn,
            resumed_at=run.resumed_at,
        )
        for kind, drawn in lines.items()
    ]


def other_charts(run: RunData) -> list[Chart]:
    """Return every metric that no other part of the page draws, including those of hooks."""
    drawn = {names.REWARD, names.STEP_TIME, *(metric for _, metric, _, _ in SMALL_CHARTS)}
    drawn |= set(names.eval_rewards(run.series).values())
    return [
        Chart(title=name, lines=[Line(name=name, points=points)], resumed_at=run.resumed_at)
        for name, points in sorted(run.series.items())
        if name not in drawn and not names.is_component(name) and not names.is_phase_time(name)
    ]


def phases(run: RunData) -> Phases | None:
    every = list(dict.fromkeys(name for _, times in run.phases for name in times))
    if not every:
        return None
    colors = {name: place % 7 for place, name in enumerate(every)}
    totals = {name: sum(times.get(name, 0.0) for _, times in run.phases) for name in every}
    everything = sum(totals.values()) or 1.0
    rows = [
        PhaseRow(
            name=name.replace("_", " "),
            color=colors[name],
            total=totals[name],
            mean=totals[name] / len(run.phases),
            share=totals[name] / everything,
        )
        for name in every
    ]
    return Phases(chart=stacked_bars(run.phases, colors, height=220), rows=rows)


def samples(run: RunData) -> Samples:
    """Return samples, newest first; for a long run all samples of evenly spaced rollouts."""
    rollout_ids = sorted({rollout_id for rollout_id, _ in run.samples})
    largest = max(Counter(rollout_id for rollout_id, _ in run.samples).values(), default=1)
    shown = evenly(rollout_ids, max(2, MAX_SAMPLES // largest))
    rows = [entry for entry in run.samples if entry[0] in set(shown)]
    rows.sort(key=lambda entry: -entry[0])
    return Samples(
        rows=rows,
        rollout_ids=shown[::-1],
        kinds=sorted({row.kind for _, row in rows}),
        labels=any(row.label is not None for _, row in rows),
        left_out=len(run.samples) - len(rows),
        run_dir=run.run_dir,
    )


def config(run: RunData) -> dict[str, list[ConfigRow]]:
    """Return the flags in three groups: set by the user, derived, default."""
    parts: dict[str, list[ConfigRow]] = {"set": [], "derived": [], "default": []}
    for name in sorted(name for name, value in run.config.items() if value is not None):
        origin = run.origins[name]
        part = origin if origin in parts else "set"
        value = run.config[name]
        text = value if isinstance(value, str) else json.dumps(value)
        parts[part].append(ConfigRow(name=name, value=text, origin=origin))
    return parts


def starts(run: RunData) -> list[tuple[str, str]]:
    """Return (time, machine) for each start of the run."""
    return [(_date(start["time"]), _machine(start)) for start in run.starts]


def status(run: RunData) -> tuple[str, str]:
    """Return "complete", "partial" or "empty", and the number of rollouts in words."""
    done, wanted = run.rollouts(), run.config.get("num_rollout")
    wanted = wanted if type(wanted) is int else None  # the file may be hostile
    if wanted == 0 and run.eval_datasets():
        return "complete", "evaluation"
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
    if not run.eval_datasets():
        return _sentence_without_eval(run)
    if run.config.get("num_rollout") == 0:
        return "Mean reward of the model on each dataset; nothing was trained."
    if done == 0:
        return "Mean reward on held-out prompts before training; no rollout is complete yet."
    return f"Mean reward on held-out prompts, at first and after {_rollouts(run)}."


def _sentence_without_eval(run: RunData) -> str:
    points = run.series.get(names.REWARD)
    if not points:
        return f"{_rollouts(run).capitalize()} recorded, without a reward."
    first, last = score(points[0][1]), score(points[-1][1])
    return (
        f"Training reward went from {first} to {last} in {_rollouts(run)}. No evaluation was run: "
        "--eval-prompt-data and --eval-interval turn it on."
    )


def _rollouts(run: RunData) -> str:
    """Return `60 rollouts of GRPO, 16 prompts x 8 samples each`, as far as the configuration is known."""
    done, config = run.rollouts(), run.config
    text = f"{done} rollout{'s' if done != 1 else ''}"
    if config.get("loss_type") == "sft_loss":
        return f"{text} of supervised training"
    if config.get("advantage_estimator"):
        text += f" of {str(config['advantage_estimator']).replace('_', ' ').upper()}"
    prompts, samples = config.get("rollout_batch_size"), config.get("n_samples_per_prompt")
    return f"{text}, {prompts} prompts x {samples} samples each" if prompts and samples else text


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
    tiles = [("Rollouts", str(run.rollouts()), f"of {run.config.get('num_rollout', '?')}")]
    if tokens := run.total(names.RESPONSE_TOKENS):
        tiles.append(("Response tokens", count(tokens), "generated for training"))
    if seconds := run.seconds():
        each = sum(run.rollout_seconds) / max(len(run.rollout_seconds), 1)
        tiles.append(("Time", duration(seconds), f"{duration(each)} a rollout"))
    if points := run.series.get(names.TOKENS_PER_SECOND):
        mean = sum(value for _, value in points) / len(points)
        tiles.append(("Generation", f"{count(mean)}/s", "tokens, mean over rollouts"))
    if points := run.series.get(names.LOG_PROB_GAP):
        worst = max(value for _, value in points)
        tiles.append(("Largest log-prob gap", number(worst), "trainer against engine"))
    if run.config:
        model = model_name(run.config.get("hf_checkpoint"))
        tiles.append(("Model", model, layout_of(run.config)))
    return tiles


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _machine(start: dict[str, Any]) -> str:
    gpus, packages = start.get("gpus"), start.get("packages")
    gpus = [gpu["name"] for gpu in gpus] if isinstance(gpus, list) else []
    device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    packages = packages if isinstance(packages, dict) else {}
    versions = ", ".join(
        f"{n} {packages[n]}" for n in ("torch", "transformers", "ray") if n in packages
    )
    commit = start.get("git_commit")
    place = f"{device}, Python {start.get('python', '?')}, {versions}"
    return f"{place}, commit {str(commit)[:12]}" if commit else place
