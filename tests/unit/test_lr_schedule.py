from __future__ import annotations

import itertools
import math

import pytest

from slime.backends.optim import DECAY_STYLES, LrSchedule, warmup_steps


def test_linear_example_of_the_docstring():
    schedule = LrSchedule(lr=1.0, min_lr=0.2, style="linear", warmup_steps=2, decay_steps=6)
    rates = [schedule.at(step) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_warm_up_rises_evenly_to_the_full_rate_and_loses_no_step(style):
    schedule = LrSchedule(lr=3.0, style=style, warmup_steps=4, decay_steps=100)
    assert [schedule.at(step) for step in range(4)] == pytest.approx([0.75, 1.5, 2.25, 3.0])


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_decay_never_rises_and_ends_at_the_minimum(style):
    schedule = LrSchedule(lr=1.0, min_lr=0.1, style=style, warmup_steps=3, decay_steps=50)
    rates = [schedule.at(step) for step in range(3, 60)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[-1] == rates[50 - 3] == 0.1
    assert rates[10] < 1.0


def test_cosine_is_halfway_in_the_middle():
    schedule = LrSchedule(lr=1.0, min_lr=0.2, style="cosine", warmup_steps=10, decay_steps=30)
    assert schedule.at(20) == pytest.approx(0.6)
    assert schedule.at(15) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_inverse_square_root_halves_when_the_step_quadruples():
    schedule = LrSchedule(
        lr=1.0, min_lr=0.3, style="inverse-square-root", warmup_steps=4, decay_steps=1000
    )
    assert schedule.at(16) == pytest.approx(0.5)
    assert schedule.at(64) == 0.3  # 0.25 is below the minimum


def test_inverse_square_root_without_warm_up_starts_at_the_full_rate():
    schedule = LrSchedule(lr=1.0, min_lr=0.1, style="inverse-square-root", decay_steps=1000)
    assert [schedule.at(step) for step in (0, 1, 4, 16)] == pytest.approx([1.0, 1.0, 0.5, 0.25])


def test_constant_stays():
    schedule = LrSchedule(lr=0.5, min_lr=0.1)
    assert {schedule.at(step) for step in (0, 1, 10**6)} == {0.5}


def test_warm_up_as_a_fraction_of_the_decay():
    assert warmup_steps(7, None, 100) == 7
    assert warmup_steps(7, 0.05, 100) == 5
    assert warmup_steps(0, 0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996


@pytest.mark.parametrize(
    "fields",
    [
        {"style": "WSD"},
        {"style": "linear"},
        {"style": "linear", "decay_steps": 3, "warmup_steps": 4},
    ],
)
def test_impossible_schedules_are_refused(fields):
    with pytest.raises(ValueError, match=r"WSD|decay steps"):
        LrSchedule(lr=1.0, **fields)
