"""Reduce metrics over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from slime.core.types import MetricSum

Sums = Mapping[str, MetricSum]
Maxima = Mapping[str, float]
Gather = Callable[[object], list]  # all-gather of one object per rank


def add_up(parts: Iterable[Sums]) -> dict[str, MetricSum]:
    """Sum each metric over parts (micro-batches, steps, ranks), of which some may lack it."""
    totals: dict[str, MetricSum] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


def reduce_metrics(sums: Sums, maxima: Maxima | None = None, *, gather: Gather) -> dict[str, float]:
    """Return the means of the sums and the largest of the maxima over all ranks, on every rank.

    Ranks (0.5+0.5)/2 and 0.8/1 give mean 0.6, not 0.65. A sum with count 0 is omitted.
    """
    gathered = gather((dict(sums), dict(maxima or {})))
    means = {k: v.mean for k, v in add_up(part for part, _ in gathered).items() if v.count}
    largest: dict[str, float] = {}
    for _, part in gathered:
        for name, value in part.items():
            largest[name] = max(value, largest[name]) if name in largest else value
    return means | largest


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Prefix the names: {"loss": 1.0} under "train" is {"train/loss": 1.0}."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
