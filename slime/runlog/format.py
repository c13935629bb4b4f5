"""Formatting of numbers and durations, shared by the terminal and the report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeVar

T = TypeVar("T")
_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None) -> str:
    """Format with about three significant digits: 0.433, 5,120, 3.1e-07."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.001:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.1e}"


def score(value: float) -> str:
    """Format a reward with fixed decimals, so that two are easy to compare: 0.100, 12.3."""
    return f"{value:.3f}" if abs(value) < 10 else number(value)


def signed(value: float | None) -> str:
    """Format a number with its sign: +0.71, -1.20."""
    if value is None or not math.isfinite(value):
        return "-"
    return "0" if value == 0 else f"{'+' if value > 0 else ''}{value:.2f}"


def duration(seconds: float) -> str:
    """Format seconds: 1.2s, 41s, 3m 07s, 2h 05m, 3d 04h."""
    if seconds < 9.95 or not math.isfinite(seconds):
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def count(value: float) -> str:
    """Format a count: 950, 12.3k, 4.56M, 1.2B."""
    # At 999.5k and more, three digits would be 1e+03k.
    for limit, divisor, suffix in ((1e4, 1, ""), (999.5e3, 1e3, "k"), (999.5e6, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / divisor:.3g}{suffix}" if suffix else f"{value:,.0f}"
    return f"{value / 1e9:.3g}B"


def equal_ranges(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split into `count` consecutive ranges of nearly equal length."""
    edges = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as bars; more than `width` of them are averaged in equal ranges.

    The scale spans at least a quarter of the largest value, so that noise looks like noise.
    """
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return ""
    if len(values) > width:
        values = [fmean(part) for part in equal_ranges(values, width)]
    high = max(values)
    low = min([*values, high - abs(high) / 4])
    if high == low:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in values)


def layout(*, trainers: int, rollout: int, colocate: bool, backend: str, engine: str) -> str:
    """Return `2 trainer + 1 rollout (fsdp, slime engine)`, `1 colocated (...)` or `1 rollout (...)`."""
    if trainers == 0:
        return f"{rollout} rollout ({engine} engine)"
    where = f"{trainers} colocated" if colocate else f"{trainers} trainer + {rollout} rollout"
    return f"{where} ({backend}, {engine} engine)"


def layout_of(config: dict[str, Any]) -> str:
    """Return `layout` of a run's configuration, "" if numbers are missing: the file may be hostile."""
    names = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
    nodes, each, rollout = (config.get(name) for name in names)
    if type(nodes) is not int or type(each) is not int or type(rollout) is not int:
        return ""
    return layout(
        trainers=nodes * each,
        rollout=rollout,
        colocate=bool(config.get("colocate")),
        backend=str(config.get("train_backend", "")),
        engine=str(config.get("rollout_engine", "")),
    )


def model_name(path: object) -> str:
    """Return the last part of a checkpoint's path: `Qwen3-4B`, `quickstart/hf`."""
    parts = [part for part in str(path or "").split("/") if part]
    if not parts:
        return "-"
    return "/".join(parts[-2:]) if parts[-1] in ("hf", "model", "checkpoint") else parts[-1]
