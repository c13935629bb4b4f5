"""What counts as a clean stop."""

from __future__ import annotations

from typing import Any

from tests.chaos.inject import ONLY_CHECKPOINT
from tests.chaos.plan import Fault, Moment
from tests.chaos.run import StartRecord, nothing_to_resume, unclean_stop

NOW = Moment(phase="train", rollout=3, delay_s=0.0, fraction=0.0)
TERM = (Fault(kind="term", target="driver", at=NOW),)
KILL = (Fault(kind="kill", target="driver", at=NOW),)


def record(**changes: Any) -> StartRecord:
    good = {
        "status": 143,
        "seconds": 9.0,
        "start_s": 5.0,
        "faults": ["SIGTERM"],
        "trained": 3,
        "saved": 3,
    }
    return StartRecord(**{**good, **changes})


def test_a_signal_saves_what_was_trained_on():
    assert unclean_stop(TERM, record()) == []
    assert unclean_stop(TERM, record(saved=1)) == ["trained up to rollout 3, but saved 1"]
    assert unclean_stop(TERM, record(status=-15)) == ["a clean stop ended with status -15"]


def test_it_may_come_too_early_or_too_late():
    assert unclean_stop(TERM, record(status=-15, start_s=0.0, trained=-1, saved=-1)) == []
    assert unclean_stop(TERM, record(status=0, saved=1)) == []


def test_a_kill_saves_nothing():
    assert unclean_stop(KILL, record(status=-9, saved=1)) == []
    assert unclean_stop((*TERM, *KILL), record(status=-9, saved=1)) == []


def test_a_run_whose_only_checkpoint_was_damaged_may_be_refused():
    damaged = record(status=-9, faults=[f"delete x {ONLY_CHECKPOINT}"])
    refused = record(status=2, faults=[])
    assert nothing_to_resume([damaged, refused])
    assert not nothing_to_resume([damaged, record(status=1, faults=[])])
    assert not nothing_to_resume([record(status=-9, faults=["delete x"]), refused])
