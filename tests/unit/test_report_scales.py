"""Axes and curves: round numbers, positions, means."""

from __future__ import annotations

import itertools
import math

import pytest

from slime.runlog.report.scales import Scale, fit, nice_ticks, smooth, thin, tick_texts


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 63), (-0.02, 0.013), (5.7559, 5.7562), (1e-9, 4e-9), (0, 5120)]
)
def test_ticks_are_round_inside_and_told_apart(low: float, high: float):
    ticks = nice_ticks(low, high, 4)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    mantissa = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5)) < 1e-6
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(ticks)
    assert [float(text.replace(",", "")) for text in texts] == pytest.approx(ticks, rel=1e-3)


def test_scale_maps_ends_to_ends():
    linear = Scale(low=0, high=10, start=100, end=0)
    assert (linear(0), linear(5), linear(10)) == (100, 50, 0)
    log = Scale(low=1e-8, high=1e-4, start=0, end=4, log=True)
    assert [log(10.0**p) for p in range(-8, -3)] == pytest.approx([0, 1, 2, 3, 4])
    assert log(0.0) == 0  # a gap of nothing stands at the bottom


@pytest.mark.parametrize("values", [[0.0], [-2.0], [1e-7, 3e-5], [3.0, 3.0], [-1.0, 5.0]])
@pytest.mark.parametrize("log", [False, True])
def test_every_value_lies_inside_its_scale(values: list[float], log: bool):
    log = log and min(values) > 0
    scale = fit(values, 100, 0, log=log)
    assert all(0 <= scale(value) <= 100 for value in values)


def test_smooth_is_a_weighted_mean_of_what_came_before():
    values = [1.0, 4.0, 2.0, 8.0]
    keep = 1 - 1 / 3
    naive = []
    for last in range(len(values)):
        weights = [keep ** (last - i) for i in range(last + 1)]
        naive.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    assert smooth(values, 3) == pytest.approx(naive)
    assert smooth(values, 1) == values


def test_thin_keeps_the_mean():
    points = [(i, float(i % 7)) for i in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert sum(y for _, y in thinned) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
    assert thin(points[:50], 100) == points[:50]


def test_tiny_numbers_have_the_digits_that_tell_them_apart():
    assert tick_texts([0.0, 2.5e-9, 5e-9]) == ["0.0e+00", "2.5e-09", "5.0e-09"]
    assert tick_texts([1.00001e-6, 1.00002e-6]) == ["1.00001e-06", "1.00002e-06"]
