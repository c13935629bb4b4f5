"""Schedules sampled from seeds."""

from __future__ import annotations

import pytest

from tests.chaos.modes import MODES
from tests.chaos.plan import DAMAGE, DISK, PHASES, parse_seeds, sample_schedule

FAULTS = {
    (seed, f) for seed in range(600) for faults in sample_schedule(seed).starts for f in faults
}


def test_seeds_are_numbers_and_ranges():
    assert parse_seeds("0-3") == [0, 1, 2, 3]
    assert parse_seeds("7 9 100-102") == [7, 9, 100, 101, 102]
    assert parse_seeds("5,3-4,4") == [5, 3, 4]


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "9-7", "1.5"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="SEEDS"):
        parse_seeds(text)


def test_a_seed_always_gives_the_same_schedule():
    assert [sample_schedule(seed) for seed in range(50)] == [
        sample_schedule(seed) for seed in range(50)
    ]
    assert len({str(sample_schedule(seed)) for seed in range(50)}) > 40


def test_every_mode_fault_and_phase_occurs():
    assert {sample_schedule(seed).mode for seed in range(600)} == set(MODES)
    kinds = {fault.kind for _, fault in FAULTS}
    assert kinds == {"kill", "stop", "term", "hup", *DISK, *DAMAGE}
    assert {fault.at.phase for _, fault in FAULTS} == set(PHASES)
    targets = {fault.target.rstrip("0123456789").rstrip("_") for _, fault in FAULTS}
    processes = {
        "driver",
        "manager",
        "trainer",
        "critic",
        "engine",
        "engine_actor",
        "raylet",
        "gcs",
    }
    assert targets == processes | {"driver_group", "disk", "checkpoint"}
    assert {len(sample_schedule(seed).starts) for seed in range(600)} == {1, 2}


def test_targets_exist_in_their_mode():
    for seed in range(600):
        schedule = sample_schedule(seed)
        mode = MODES[schedule.mode]
        for fault in [fault for faults in schedule.starts for fault in faults]:
            name, _, index = fault.target.rpartition("_")
            if name == "trainer":
                assert int(index) < mode.ranks
            if name in ("engine", "engine_actor"):
                assert int(index) < mode.engines
            assert name != "critic" or mode.critic


def test_only_engines_may_be_lost_without_an_end():
    for _, fault in FAULTS:
        name = fault.target.rstrip("0123456789").rstrip("_")
        assert fault.loses_engine_only == (name in ("engine", "engine_actor"))
