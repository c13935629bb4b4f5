"""Several runs on one page: their settings, the differences, and their curves on common charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.flags.spec import option_of
from slime.core.errors import UserError
from slime.runlog import metric_names as names
from slime.runlog.format import score
from slime.runlog.report import sections
from slime.runlog.report.charts import Chart, Line
from slime.runlog.run_folder import RunData

MAX_RUNS = 7  # colours of the style sheet


@dataclass(kw_only=True, frozen=True)
class RunRow:
    name: str
    color: int
    status: str
    rewards: list[str]  # "0.100 → 0.950" of each measure, "-" where the run has none
    seconds: float


def comparison(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the values of the template; the position of a run is its colour on every chart."""
    labels = run_names(runs)
    rewards = {"train reward": names.REWARD}
    for dataset, metric in names.eval_rewards(_metrics(runs)).items():
        rewards[f"eval reward · {dataset}"] = metric
    rewards = {label: metric for label, metric in rewards.items() if metric in _metrics(runs)}
    small = {metric for _, metric, _, _ in sections.SMALL_CHARTS}
    rest = [name for name in sorted(_metrics(runs)) if name not in {*rewards.values(), *small}]
    components = [name for name in rest if names.is_component(name)]
    return {
        "name": " · ".join(labels),
        "measures": list(rewards),
        "rows": [
            RunRow(
                name=label,
                color=color,
                status=sections.status(run)[1],
                rewards=[_change(run, metric) for metric in rewards.values()],
                seconds=run.seconds(),
            )
            for color, (label, run) in enumerate(zip(labels, runs, strict=True))
        ],
        "differences": differences(runs),
        "rewards": [
            _chart(runs, metric, label[0].upper() + label[1:], height=260)
            for label, metric in [*rewards.items(), *((name, name) for name in components)]
        ],
        "charts": [
            _chart(runs, metric, title, help=meaning, log=log)
            for title, metric, log, meaning in sections.SMALL_CHARTS
            if metric in _metrics(runs)
        ],
        "others": [_chart(runs, name, name) for name in rest if name not in components],
    }


def run_names(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the folders, or their paths if two have the same name."""
    folders = [run.run_dir.resolve() for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(f"{folder} is named twice: a comparison needs different runs")
    if len(runs) > MAX_RUNS:
        raise UserError(
            f"{len(runs)} runs have more curves than one chart can tell apart: name at most {MAX_RUNS}"
        )
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Return (flag, value in each run) of the flags that differ; those that a user set come first.

    Paths inside a run's own folder are the same in every run.
    """
    flags = sorted({name for run in runs for name in run.config})
    given = {
        name
        for run in runs
        for name, origin in run.origins.items()
        if origin not in ("default", "derived")
    }
    rows = [(name, [_text(run, name) for run in runs]) for name in flags]
    rows.sort(key=lambda row: row[0] not in given)
    return [(option_of(name), values) for name, values in rows if len(set(values)) > 1]


def _text(run: RunData, name: str) -> str:
    value = run.config.get(name)
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    folder = run.config.get("run_dir")
    return text.replace(folder, "{run_dir}") if isinstance(folder, str) and folder else text


def _metrics(runs: Sequence[RunData]) -> set[str]:
    return {name for run in runs for name, points in run.series.items() if points}


def _change(run: RunData, metric: str) -> str:
    points = run.series.get(metric)
    if not points:
        return "-"
    first, last = score(points[0][1]), score(points[-1][1])
    return f"{first} → {last}" if len(points) > 1 else last


def _chart(
    runs: Sequence[RunData],
    metric: str,
    title: str,
    *,
    help: str = "",
    log: bool = False,
    height: int = 165,
) -> Chart:
    named = enumerate(zip(run_names(runs), runs, strict=True))
    lines = [
        Line(
            name=name,
            points=run.series[metric],
            color=color,
            markers=metric.startswith("eval/"),
        )
        for color, (name, run) in named
        if run.series.get(metric)
    ]
    return Chart(title=title, lines=lines, help=help, log=log, height=height)
