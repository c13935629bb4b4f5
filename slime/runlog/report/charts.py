"""The data of the report's charts; the page's script draws them with uPlot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

from slime.runlog.format import equal_ranges, number

MAX_POINTS = 600
MAX_BARS = 80
SMOOTHED_FROM = 12  # fewer points are drawn as they are


@dataclass(kw_only=True, frozen=True)
class Line:
    name: str
    points: list[tuple[int, float]]  # (rollout_id, value)
    color: int = 0  # index of a series colour in the style sheet
    markers: bool = False  # few separate measurements: dots joined by straight lines


@dataclass(kw_only=True, frozen=True)
class Chart:
    title: str
    lines: list[Line]
    help: str = ""
    log: bool = False
    height: int = 165
    resumed_at: Sequence[int] = field(default_factory=tuple)

    @property
    def lasts(self) -> list[tuple[str, int, str]]:
        """(name, colour, last value) of each line, for the legend."""
        return [(line.name, line.color, number(line.points[-1][1])) for line in self.lines]

    @property
    def html(self) -> Markup:
        xs = [x for line in self.lines for x, _ in line.points]
        positive = any(value > 0 for line in self.lines for _, value in line.points)
        resumes = [x for x in self.resumed_at if min(xs) <= x <= max(xs)]
        options = {"height": self.height, "log": self.log and positive, "resumed_at": resumes}
        return _element(self.title, lines=[_line(line) for line in self.lines], options=options)


def stacked_bars(
    phases: list[tuple[int, dict[str, float]]], colors: dict[str, int], height: int
) -> Markup:
    """Draw seconds per phase: one bar per rollout, or per range of rollouts if there are many."""
    ranges = equal_ranges(phases, min(len(phases), MAX_BARS))
    labels = [(part[0][0], part[-1][0]) for part in ranges]
    bars = [
        {
            "name": name.replace("_", " "),
            "color": color,
            "seconds": [sum(t.get(name, 0.0) for _, t in part) / len(part) for part in ranges],
        }
        for name, color in colors.items()
    ]
    options = {
        "height": height,
        "labels": [f"{a}" if a == b else f"{a}-{b}" for a, b in labels],
    }
    return _element("seconds per phase", bars=bars, options=options)


def smooth(values: list[float], window: float) -> list[float]:
    """Return the exponential moving average over about `window` values, unbiased at the start."""
    keep = 1 - 1 / max(window, 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        result.append(total / weight)
    return result


def thin(points: list[tuple[int, float]], limit: int) -> list[tuple[float, float]]:
    """Average equal ranges of points so that at most `limit` points remain."""
    if len(points) <= limit:
        return [(float(x), y) for x, y in points]
    ranges = equal_ranges(points, limit)
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in ranges]


def _line(line: Line) -> dict[str, Any]:
    points = thin(line.points, MAX_POINTS)
    record = {
        "name": line.name,
        "color": line.color,
        "markers": line.markers or len(points) == 1,
        "points": [[round(x, 2), y] for x, y in points],
    }
    if not line.markers and len(points) >= SMOOTHED_FROM:
        record["mean"] = smooth([y for _, y in points], len(points) / 20)
    return record


def _element(title: str, **data: Any) -> Markup:
    attributes = "".join(f' data-{k}="{escape(json.dumps(v))}"' for k, v in data.items())
    height = data["options"]["height"]
    return Markup(
        f'<div class="chart" role="img" aria-label="{escape(title)}" style="height:{height}px"'
        f"{attributes}></div>"
    )
