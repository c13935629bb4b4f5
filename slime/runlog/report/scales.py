"""Axes: which numbers to write beside a curve, and where a value stands on the page."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(kw_only=True, frozen=True)
class Scale:
    """Maps values low..high to pixels start..end, by logarithm if asked."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._axis(self.low), self._axis(self.high)
        share = (self._axis(value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, wanted: int) -> list[float]:
        return (
            log_ticks(self.low, self.high) if self.log else nice_ticks(self.low, self.high, wanted)
        )

    def _axis(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def fit(values: list[float], start: float, end: float, *, log: bool = False) -> Scale:
    """A scale with a little air around the values; a constant gets a range around it."""
    low, high = min(values), max(values)
    if log:
        positive = [v for v in values if v > 0]
        low = 10 ** math.floor(math.log10(min(positive)))
        high = 10 ** math.ceil(math.log10(max(positive)))
        high = high if high > low else low * 10
        return Scale(low=low, high=high, start=start, end=end, log=True)
    if high == low:
        air = abs(high) / 2 or 1.0
        return Scale(low=low - air if low < 0 else 0.0, high=high + air, start=start, end=end)
    air = (high - low) * 0.06
    floor = 0.0 if low >= 0 and low < (high - low) / 2 else low - air
    return Scale(low=floor, high=high + air, start=start, end=end)


def nice_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers between low and high: 0, 20, 40, 60 for (0, 63, 4)."""
    if not high > low:
        return [low]
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_texts(ticks: list[float], *, log: bool = False) -> list[str]:
    """As many decimals as tell neighbours apart, the same for all: 0.0, 0.5, 1.0."""
    if log or not ticks:
        return [f"{value:.0e}" for value in ticks]
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) % 1:  # 2.5 of a unit
        decimals += 1
    if decimals > 5:
        power = math.floor(math.log10(max(map(abs, ticks))))
        return [f"{value:.{max(0, decimals + power)}e}" for value in ticks]
    return [f"{value:,.{decimals}f}" for value in ticks]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, at most six of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**power for power in range(first, last + 1, stride)]


def smooth(values: list[float], window: float) -> list[float]:
    """Exponential mean over about `window` values, without a bias towards the first."""
    keep = 1 - 1 / max(window, 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        result.append(total / weight)
    return result


def thin(points: list[tuple[int, float]], limit: int) -> list[tuple[float, float]]:
    """Means of equal stretches when there are more than `limit` points."""
    if len(points) <= limit:
        return [(float(x), y) for x, y in points]
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    stretches = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches]
