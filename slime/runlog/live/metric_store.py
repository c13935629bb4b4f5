"""The metrics of a run as arrays, read in steps while the run writes them, and thinned for drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from slime.runlog.earlier_runs import METRICS_FILE
from slime.runlog.jsonl import LineTail, parse_line
from slime.runlog.metric_names import RECORD_KEYS, is_record

MAX_POINTS = 500
_MAX_NAMES = 10_000


class Series:
    """One metric: rollout, Unix time and value of each record, in the order of logging."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []  # [4, n] each: line, rollout, time, value

    def add(self, part: np.ndarray) -> None:
        self._parts.append(part)

    def _row(self, number: int) -> np.ndarray:
        if len(self._parts) > 1:
            whole = np.concatenate(self._parts, axis=1)
            self._parts = [whole[:, np.argsort(whole[0], kind="stable")]]
        return self._parts[0][number]

    @property
    def rollouts(self) -> np.ndarray:
        return self._row(1)

    @property
    def times(self) -> np.ndarray:
        return self._row(2)

    @property
    def values(self) -> np.ndarray:
        return self._row(3)


class MetricStore:
    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / METRICS_FILE)
        self._restarts = 0
        self.series: dict[str, Series] = {}
        self.version = 0  # counts up with every record that was read
        self.first_time: float | None = None
        self.last_time: float | None = None

    def update(self) -> None:
        """Read what was written since the last call."""
        lines = self._tail.read()
        if self._tail.restarts != self._restarts:  # the file was cut back for a resume
            self._restarts, self.series, self.first_time = self._tail.restarts, {}, None
            self.version += 1
        # Records with the same names become one matrix: a long run has few kinds of records.
        tables: dict[tuple[str, ...], list[list[Any]]] = {}
        for _, line in lines:
            record = parse_line(line)
            if record is not None and is_record(record):
                self.version += 1
                record["kind"] = self.version  # the only string; replaced by the line's number
                tables.setdefault(tuple(record), []).append(list(record.values()))
        for names, rows in tables.items():
            self._add(names, _matrix(rows))

    def _add(self, names: tuple[str, ...], table: np.ndarray) -> None:
        head = [table[:, names.index(key)] for key in ("kind", "rollout_id", "time")]
        first, last = float(head[2].min()), float(head[2].max())
        self.first_time = first if self.first_time is None else min(self.first_time, first)
        self.last_time = last if self.last_time is None else max(self.last_time, last)
        for place, name in enumerate(names):
            known = name in self.series or len(self.series) < _MAX_NAMES
            if known and name not in RECORD_KEYS:
                self.series.setdefault(name, Series()).add(np.stack([*head, table[:, place]]))

    def values(self, name: str) -> np.ndarray:
        """Return the values of a metric, an empty array if it was never logged."""
        series = self.series.get(name)
        return np.zeros(0) if series is None else series.values

    def last(self, name: str) -> float | None:
        values = self.values(name)
        return float(values[-1]) if len(values) and np.isfinite(values[-1]) else None

    def drawn(
        self, name: str, *, by_time: bool = False, window: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """Return x, y and, if points were joined, the lowest and highest value of each drawn point."""
        series = self.series.get(name)
        if series is None:
            return {"x": [], "y": []}
        x = series.times - (self.first_time or 0.0) if by_time else series.rollouts
        y = series.values
        if window is not None:
            inside = (x >= window[0]) & (x <= window[1])
            x, y = x[inside], y[inside]
        return thinned(x, y)


def thinned(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> dict[str, Any]:
    """Average equal ranges of points so that at most `limit` remain; None stands for NaN.

    Ten points with limit 5 become five pairs: x and y are means, low and high the range of each pair.
    """
    if len(x) <= limit:
        return {"x": x, "y": finite_or_none(y)}
    edges = np.linspace(0, len(x), limit + 1).astype(int)[:-1]
    finite = np.isfinite(y)
    counts = np.maximum(np.add.reduceat(finite.astype(float), edges), 1e-9)
    sums = np.add.reduceat(np.where(finite, y, 0.0), edges)
    lens = np.diff(np.append(edges, len(x)))
    means = np.where(counts >= 1, sums / counts, np.nan)
    low = np.minimum.reduceat(np.where(finite, y, np.inf), edges)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), edges)
    return {
        "x": np.add.reduceat(x, edges) / lens,
        "y": finite_or_none(means),
        "low": finite_or_none(low),
        "high": finite_or_none(high),
    }


def finite_or_none(values: np.ndarray) -> list[float | None]:
    return [v if ok else None for v, ok in zip(values.tolist(), np.isfinite(values), strict=True)]


def _matrix(rows: list[list[Any]]) -> np.ndarray:
    """Return the values as numbers; null, for NaN or infinite, and anything that is no number become NaN."""
    try:
        return np.array(rows, np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.array([[_as_float(value) for value in row] for row in rows])


def _as_float(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan
