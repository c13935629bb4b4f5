"""Counters of a rollout, and what a user is told while no sample finishes."""

import re
import time

from slime.core.types import Sample, Status
from slime.rollout.metrics import Progress, ProgressMonitor


def test_counts_are_those_of_the_samples():
    made = Progress(rollout_id=1)
    made.count(Sample(response_length=3, status=Status.COMPLETED))
    made.count(Sample(response_length=4, status=Status.FAILED))
    assert (made.generated_samples, made.failed_samples, made.response_tokens) == (2, 1, 7)


def test_a_stall_is_reported_after_two_minutes_and_each_time_it_has_doubled():
    monitor = ProgressMonitor()

    def told_seconds():
        text = re.fullmatch(
            r"rollout 7: no sample has been finished for (\d+) s", monitor.stall_warning() or ""
        )
        assert text is not None
        return int(text[1])

    def quiet_for(seconds):
        running.last_sample = beginning = time.monotonic() - seconds
        return beginning

    running = monitor.start(Progress(rollout_id=7, finished=False))
    quiet_for(100)
    assert monitor.stall_warning() is None
    beginning = quiet_for(130)
    seconds = told_seconds()
    assert 130 <= seconds <= time.monotonic() - beginning + 1
    assert monitor.stall_warning() is None  # told already
    monitor._warned = (beginning, 60.0)
    assert told_seconds() >= seconds
    running.finished = True
    quiet_for(1000)
    assert monitor.stall_warning() is None
