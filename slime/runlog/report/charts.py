"""Curves and bars as inline SVG; colours come from the page's style sheet, tooltips from its script."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from slime.runlog.format import duration, number
from slime.runlog.report.scales import Scale, fit, nice_ticks, smooth, thin, tick_texts

MAX_POINTS = 600
MAX_BARS = 80
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 12.0, 10.0, 24.0


@dataclass(kw_only=True, frozen=True)
class Line:
    name: str
    points: list[tuple[int, float]]  # (rollout_id, value)
    color: int = 0  # number of a series colour in the style sheet
    markers: bool = False  # few, separate measurements: dots joined by straight lines


@dataclass(kw_only=True, frozen=True)
class Chart:
    title: str
    lines: list[Line]
    help: str = ""
    log: bool = False
    width: int = 400
    height: int = 190
    resumed_at: Sequence[int] = field(default_factory=tuple)

    @property
    def lasts(self) -> list[tuple[str, int, str]]:
        """(name, colour, last value) of each line, for the legend."""
        return [(line.name, line.color, number(line.points[-1][1])) for line in self.lines]


def line_chart(chart: Chart) -> Markup:
    values = [value for line in chart.lines for _, value in line.points]
    log = chart.log and any(value > 0 for value in values)
    xs = [x for line in chart.lines for x, _ in line.points]
    bottom = chart.height - _BOTTOM
    across = Scale(
        low=min(xs), high=max(max(xs), min(xs) + 1), start=_LEFT, end=chart.width - _RIGHT
    )
    up = fit(values, bottom, _TOP, log=log)
    parts = [_axes(across, up, chart)]
    parts += [
        f'<line class="resume" x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        for x in chart.resumed_at
        if across.low <= x <= across.high
    ]
    hover = []
    for line in chart.lines:
        points = thin(line.points, MAX_POINTS)
        parts.append(_line(line, points, across, up))
        pixels = [[round(x, 2), y, round(across(x), 1), round(up(y), 1)] for x, y in points]
        hover.append({"name": line.name, "color": line.color, "points": pixels})
    return _svg(chart.width, chart.height, chart.title, "".join(parts), hover)


def stacked_bars(
    phases: list[tuple[int, dict[str, float]]], colors: dict[str, int], width: int, height: int
) -> Markup:
    """Seconds per phase, one bar per rollout or, when there are many, per stretch of rollouts."""
    stretches = _stretches(phases)
    highest = max(sum(times.values()) for _, times in stretches)
    up = Scale(low=0.0, high=highest * 1.05 or 1.0, start=height - _BOTTOM, end=_TOP)
    pitch = (width - _LEFT - _RIGHT) / len(stretches)
    parts = [_horizontal_lines(up, width, 4, "s")]
    labelled = nice_ticks(0, len(stretches) - 1, 8) if len(stretches) > 1 else [0]
    for place, (label, times) in enumerate(stretches):
        x = _LEFT + place * pitch
        parts.append(_bar(x + pitch * 0.1, min(pitch * 0.8, 60), up, label, times, colors))
        if place in labelled:
            middle = x + min(pitch, 75) / 2
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{height - 7}" text-anchor="middle">'
                f"{escape(label.split('-')[0])}</text>"
            )
    return _svg(width, height, "seconds per phase", "".join(parts), [])


def _stretches(phases: list[tuple[int, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    count = min(len(phases), MAX_BARS)
    edges = [round(i * len(phases) / count) for i in range(count + 1)]
    result = []
    for a, b in itertools.pairwise(edges):
        names = dict.fromkeys(name for _, times in phases[a:b] for name in times)
        means = {n: sum(t.get(n, 0.0) for _, t in phases[a:b]) / (b - a) for n in names}
        first, last = phases[a][0], phases[b - 1][0]
        result.append((f"{first}" if first == last else f"{first}-{last}", means))
    return result


def _bar(
    x: float, width: float, up: Scale, label: str, times: dict[str, float], colors: dict[str, int]
) -> str:
    parts, base = [], 0.0
    for name in (n for n in colors if n in times):
        top = base + times[name]
        parts.append(
            f'<rect class="fill c{colors[name]}" x="{x:.1f}" y="{up(top):.1f}" '
            f'width="{width:.1f}" height="{max(up(base) - up(top), 0):.1f}"/>'
        )
        base = top
    rows = [
        [name.replace("_", " "), colors[name], duration(times[name])]
        for name in colors
        if name in times
    ]
    tip = json.dumps({"title": f"rollout {label}", "rows": [*rows, ["in all", -1, duration(base)]]})
    return f'<g class="bar" data-tip="{escape(tip)}">{"".join(parts)}</g>'


def _axes(across: Scale, up: Scale, chart: Chart) -> str:
    parts = [_horizontal_lines(up, chart.width, chart.height // 45)]
    whole = [x for x in across.ticks(max(3, chart.width // 90)) if x == int(x)]
    for x in whole:
        parts.append(
            f'<text class="tick" x="{across(x):.1f}" y="{chart.height - 7}" text-anchor="middle">'
            f"{'start' if x < 0 else int(x)}</text>"
        )
    return "".join(parts)


def _horizontal_lines(up: Scale, width: int, wanted: int, unit: str = "") -> str:
    parts = []
    ticks = up.ticks(wanted)
    for value, text in zip(ticks, tick_texts(ticks, log=up.log), strict=True):
        y = up(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{text}{unit}</text>"
        )
    return "".join(parts)


def _line(line: Line, points: list[tuple[float, float]], across: Scale, up: Scale) -> str:
    """Dots and straight lines for measurements; else the values, faint, and their running mean."""
    if line.markers or len(points) == 1:
        dots = "".join(
            f'<circle class="dot c{line.color}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.2"/>'
            for x, y in points
        )
        return _path(points, across, up, f"line c{line.color}") + dots
    if len(points) < 12:
        return _path(points, across, up, f"line c{line.color}")
    means = smooth([y for _, y in points], len(points) / 20)
    averaged = [(x, mean) for (x, _), mean in zip(points, means, strict=True)]
    return _path(points, across, up, f"line faint c{line.color}") + _path(
        averaged, across, up, f"line c{line.color}"
    )


def _path(points: list[tuple[float, float]], across: Scale, up: Scale, css: str) -> str:
    steps = " L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
    return f'<path class="{css}" d="M{steps}"/>'


def _svg(width: int, height: int, title: str, inside: str, hover: list[dict]) -> Markup:
    data = f' data-lines="{escape(json.dumps(hover))}"' if hover else ""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
        f"{data}>{inside}</svg>"
    )
