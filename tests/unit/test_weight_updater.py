"""Versions and retries of weight updates, with a trainer and engines that are played."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from slime.core.errors import UserError, WeightMismatchError
from slime.core.types import EngineInfo, SyncReport
from slime.ray.engine_group import EngineCallError
from slime.ray.weight_updater import WeightUpdater
from slime.utils.sync_http import HttpError
from tests.args import make_args

ENGINES = [EngineInfo(url=f"http://engine{i}", device_ids=(f"gpu{i}",)) for i in range(2)]


class PlayedTrainer:
    """`errors`: raised by the first pushes, one each; `pushes` are (engines, version)."""

    def __init__(self, *errors: Exception):
        self.errors, self.pushes, self.asleep = list(errors), [], False
        self.calls: list[str] = []

    def all(self, method) -> list[SyncReport]:
        return [method(self)]

    def update_weights(self, engines: list[EngineInfo], version: int) -> SyncReport:
        assert not self.asleep
        self.pushes.append((list(engines), version))
        self.calls.append("push")
        if self.errors:
            raise self.errors.pop(0)
        return SyncReport(
            version=version,
            nbytes=8,
            num_tensors=1,
            num_buckets=1,
            num_engines=len(engines),
            seconds=1.0,
            checksum_seconds=0.1,
        )

    def wake_up(self) -> None:
        if self.asleep:
            self.asleep = False
            self.calls.append("wake")

    def sleep(self) -> None:
        if not self.asleep:
            self.asleep = True
            self.calls.append("sleep")


class PlayedEngines:
    """`failures`: the indices that each check finds failed, one list after the other."""

    def __init__(self, *failures: list[int]):
        self.infos, self.unsynced = list(ENGINES), []
        self.failures, self.told, self.admitted = list(failures), [], 0
        self.calls: list[str] = []
        self.lost: list[Exception] = []  # raised by the next checks of the probe

    def replace_failed(self, *, paused: bool = False, known=(), before=lambda: None) -> list[int]:
        found = sorted({*(self.failures.pop(0) if self.failures else []), *known})
        if found:
            before()
            self.calls.append("replace")
        return found

    def admit(self) -> None:
        self.admitted += 1
        self.calls.append("admit")

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def release(self) -> None:
        self.calls.append("release")

    def set_version(self, version: int, rollout_id: int | None) -> None:
        self.told.append((version, rollout_id))

    def resume(self, tag: str) -> None:
        self.calls.append(tag)

    def check_probe(self, probe: Any) -> None:
        if self.lost:
            raise self.lost.pop()


class Recorder:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.events: list[tuple[str, dict[str, object]]] = []

    def event(self, kind: str, **values: object) -> None:
        self.events.append((kind, values))

    def phase(self, name: str):
        return nullcontext()

    def add(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


def make(trainer: PlayedTrainer, engines: PlayedEngines, version: int = 0, **flags) -> Any:
    args = make_args(**{"use_fault_tolerance": True, **flags})
    trainer.calls = engines.calls
    played: Any = (trainer, engines, Recorder())
    return WeightUpdater(args, *played, version=version)


def test_every_step_that_is_sent_has_a_version_of_its_own():
    trainer, engines = PlayedTrainer(), PlayedEngines()
    updater = make(trainer, engines, version=5)  # of the checkpoint
    updater.update()
    updater.trained(3)
    assert updater.trained_version == 6
    updater.update(3)
    assert [version for _, version in trainer.pushes] == [6, 7]
    assert engines.told == [(6, None), (7, 3)] and engines.admitted == 2


def test_a_skipped_rollout_sends_nothing():
    trainer = PlayedTrainer()
    updater = make(trainer, PlayedEngines(), update_weights_interval=2)
    updater.trained(0)
    updater.update(0)
    assert trainer.pushes == []
    updater.trained(1)
    updater.update(1)
    assert [version for _, version in trainer.pushes] == [1]


def test_the_last_rollout_is_never_skipped():
    """Its evaluation is of the weights that are saved."""
    trainer = PlayedTrainer()
    updater = make(trainer, PlayedEngines(), update_weights_interval=2, num_rollout=3)
    updater.trained(2)
    updater.update(2)
    assert [version for _, version in trainer.pushes] == [1]


def test_restarted_engines_get_the_weights_of_the_trainer_and_the_next_update_the_same_version():
    trainer, engines = PlayedTrainer(), PlayedEngines()
    updater = make(trainer, engines)
    updater.update()
    updater.trained(0)
    engines.unsynced = ENGINES[:1]
    updater.update_restarted()
    updater.update(0)
    assert trainer.pushes == [(ENGINES, 1), (ENGINES[:1], 2), (ENGINES, 2)]
    assert engines.told == [(1, None), (2, 0), (2, 0)]


def test_an_update_is_repeated_with_the_engines_that_were_replaced():
    trainer = PlayedTrainer(RayTaskError("update_weights", "", ValueError("connection reset")))
    engines = PlayedEngines([], [1])  # before the update, after the failure
    updater = make(trainer, engines)
    updater.update()
    assert len(trainer.pushes) == 2 and engines.admitted == 1
    assert engines.calls == ["weights", "push", "replace", "weights", "push", "kv_cache", "admit"]


SHARED = {"colocate": True, "rollout_num_gpus": None}
WHOLE = ["weights", "push", "sleep", "kv_cache", "admit"]  # an update of all engines


def test_shared_gpus_hold_no_trainer_while_an_engine_starts():
    trainer = PlayedTrainer(RayTaskError("update_weights", "", ValueError("connection reset")))
    engines = PlayedEngines([0], [1])  # before the update, after the failure
    make(trainer, engines, **SHARED).update()
    replaced = ["sleep", "replace", "release", "wake"]
    assert engines.calls == [*replaced, "weights", "push", *replaced, *WHOLE]


def test_during_a_rollout_engines_give_their_memory_to_the_trainer_for_a_restarted_one():
    trainer, engines = PlayedTrainer(), PlayedEngines()
    updater = make(trainer, engines, **SHARED)
    updater.update()
    assert engines.calls == WHOLE and trainer.asleep
    engines.calls.clear()
    engines.unsynced = ENGINES[:1]
    updater.update_restarted()
    woken = ["interrupt", "release", "wake", "weights", "push", "sleep", "kv_cache", "admit"]
    assert engines.calls == woken and trainer.pushes[1:] == [(ENGINES[:1], 1)]


def test_an_update_that_failed_when_engines_had_memory_again_begins_with_its_release():
    trainer, engines = PlayedTrainer(), PlayedEngines()
    engines.lost = [HttpError("http://engine0 does not answer")]
    make(trainer, engines, **SHARED).update()
    assert engines.calls == ["weights", "push", "sleep", "kv_cache", "release", "wake", *WHOLE]


def test_without_fault_tolerance_the_first_error_ends_the_update():
    engines = PlayedEngines()
    engines.lost = [HttpError("http://engine0 does not answer")]
    with pytest.raises(UserError, match="engine0 does not answer"):
        make(PlayedTrainer(), engines, **SHARED, use_fault_tolerance=False).update()
    assert engines.calls == ["weights", "push", "sleep", "kv_cache"]


def test_a_trainer_that_never_sleeps_updates_a_restarted_engine_alone():
    trainer, engines = PlayedTrainer(), PlayedEngines()
    updater = make(trainer, engines)
    updater.update()
    engines.calls.clear()
    engines.unsynced = ENGINES[:1]
    updater.update_restarted()
    assert engines.calls == ["weights", "push", "admit"]


def test_an_update_that_reached_no_engine_is_tried_once_more_without_a_failed_engine():
    lost = HttpError("http://engine0 does not answer")
    trainer = PlayedTrainer(lost)
    make(trainer, PlayedEngines()).update()
    assert len(trainer.pushes) == 2
    trainer = PlayedTrainer(lost, lost)
    with pytest.raises(UserError, match="does not answer"):
        make(trainer, PlayedEngines()).update()
    assert len(trainer.pushes) == 2


@pytest.mark.parametrize("flags", [{}, {"use_fault_tolerance": False}])
def test_an_error_that_no_engine_explains_is_raised_at_once(flags):
    error = RayTaskError("update_weights", "", ValueError("a bug"))
    trainer = PlayedTrainer(error)
    with pytest.raises(RayTaskError):
        make(trainer, PlayedEngines(), **flags).update()
    assert len(trainer.pushes) == 1


def test_engines_that_fail_every_time_end_the_update():
    trainer = PlayedTrainer(*[EngineCallError("engine 1 is gone", [1]) for _ in range(9)])
    with pytest.raises(UserError, match="engine 1 is gone"):
        make(trainer, PlayedEngines()).update()
    assert len(trainer.pushes) == 5


def test_wrong_weights_are_never_sent_again():
    error = RayTaskError("update_weights", "", WeightMismatchError("checksums differ"))
    error = error.as_instanceof_cause()  # as Ray raises it
    trainer = PlayedTrainer(error)
    with pytest.raises(WeightMismatchError):
        make(trainer, PlayedEngines([0], [0])).update()
    assert len(trainer.pushes) == 1
