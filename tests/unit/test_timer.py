"""Seconds per phase, on a clock the test moves by hand."""

from __future__ import annotations

import threading

import pytest

from slime.runlog.perf_metrics import Timer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_nest_and_start_afresh():
    clock = Clock()
    timer = Timer(clock)
    for seconds in (1.0, 2.0):
        with timer.phase("generate"):
            clock.now += seconds
    with timer.phase("train"):
        clock.now += 0.5
        with timer.phase("log_probs"):
            clock.now += 0.25
    clock.now += 4.0
    assert timer.take() == {
        "perf/generate_time": 3.0,
        "perf/train_time": 0.75,
        "perf/train/log_probs_time": 0.25,
        "perf/step_time": 7.75,
    }
    clock.now += 1.0
    assert timer.take() == {"perf/step_time": 1.0}


def test_a_phase_that_raises_is_counted_and_left():
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(RuntimeError), timer.phase("train"):
        clock.now += 2.0
        raise RuntimeError
    with timer.phase("save"):
        clock.now += 1.0
    assert timer.take() == {"perf/train_time": 2.0, "perf/save_time": 1.0, "perf/step_time": 3.0}


def test_threads_nest_on_their_own():
    timer = Timer(Clock())

    def work() -> None:
        with timer.phase("generate"):
            pass

    with timer.phase("train"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(timer.take()) == {"perf/train_time", "perf/generate_time", "perf/step_time"}


def test_seconds_measured_elsewhere_are_added():
    clock = Clock()
    timer = Timer(clock)
    with timer.phase("train"):
        clock.now += 1.0
    timer.add("train", 0.5)
    assert timer.take()["perf/train_time"] == 1.5
