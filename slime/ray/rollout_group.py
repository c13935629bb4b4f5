"""The driver's handle on the rollout side: the verbs of the loop, timed and recorded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from slime.config.arguments import Args
from slime.core.types import RolloutResult
from slime.diagnosis.exit_status import StopSignal
from slime.ray.engines import Engines
from slime.ray.watch import Member, Watch
from slime.ray.weight_updater import WeightUpdater
from slime.runlog.recorder import Recorder

if TYPE_CHECKING:
    from slime.ray.rollout import RolloutManager

_ANSWER_S = 10.0  # for a question that is answered at once
T = TypeVar("T")


class RolloutGroup:
    """`never_stops`: whether the rollout function generates between rollouts too."""

    def __init__(
        self,
        args: Args,
        *,
        manager: Member[RolloutManager],
        engines: Engines,
        updater: WeightUpdater,
        recorder: Recorder,
        watch: Watch,
        stop_signal: StopSignal,
        never_stops: bool,
    ):
        self.args, self.recorder, self.stop_signal = args, recorder, stop_signal
        self.never_stops = never_stops
        self.updater, self._manager, self._engines = updater, manager, engines
        self._watch = watch
        self._last_begun: int | None = None
        self._generating: ray.ObjectRef[RolloutResult] | None = None  # the rollout that was begun
        self._failures_told: set[str] = set()  # datasets; "" for training

    def generate(self, rollout_id: int) -> list[Any]:
        """Return the samples of one rollout as one object per data-parallel rank."""
        self.begin(rollout_id)
        return self.finish()

    def begin(self, rollout_id: int) -> None:
        """Have a rollout generated in the background, until `finish`."""
        self._last_begun = rollout_id
        self._generating = self._manager.remote.call(lambda manager: manager.generate(rollout_id))

    def settle(self) -> None:
        """Wait for the rollout begun last, so that it is made by one version of the weights."""
        if self._generating is not None:
            with self.recorder.phase("generate"), self.stop_signal.interruptible():
                self._watched(self._generating)

    def finish(self) -> list[Any]:
        """Return the rollout begun last."""
        assert self._generating is not None, "`begin` comes first"
        with self.recorder.phase("generate"), self.stop_signal.interruptible():
            result = self._watched(self._generating)
            self._engines.release()
        self._generating = None
        self.recorder.add(result.metrics)
        failed, samples = (result.metrics.get(f"rollout/{k}", 0) for k in ("failed", "samples"))
        if failed:
            self._warn_once(
                "", f"{failed:.0f} of {samples:.0f} samples of rollout {self._last_begun}"
            )
        return result.batch_refs

    def eval(self, rollout_id: int) -> None:
        """Score the evaluation datasets with the weights after `rollout_id` (-1: before training)."""
        if self.args.debug_train_only:  # which starts no engine
            return
        with self.recorder.phase("eval"), self.stop_signal.interruptible():
            metrics = self._watched(
                self._manager.remote.call(lambda manager: manager.eval(rollout_id))
            )
        self.recorder.add(metrics)
        for name, failed in sorted(metrics.items()):
            if failed and name.startswith("eval/") and name.endswith("/failed"):
                dataset = name.removeprefix("eval/").removesuffix("/failed")
                self._warn_once(dataset, f"{failed:.0f} samples of the evaluation on {dataset}")

    def save(self, path: str, rollout_id: int) -> None:
        """Save the state after `rollout_id`, also when the next rollout is being generated already."""
        begun = self._last_begun is not None and self._last_begun > rollout_id
        self._watch.call(
            self._manager, lambda manager: manager.save(path, rollout_id, before_generate=begun)
        )

    def stop_engines(self) -> None:
        self._engines.stop()

    def _warn_once(self, dataset: str, which: str) -> None:
        """Warn the first time; the metric counts failures in every rollout."""
        if dataset not in self._failures_told:
            self._failures_told.add(dataset)
            log = Path(self.args.run_dir) / "logs" / "rollout.log"
            self.recorder.message(f"warning: {which} failed and do not count; why is in {log}")

    def _watched(self, reference: ray.ObjectRef[T]) -> T:
        """Return the result; meanwhile replace engines that fail and give them the current weights."""
        wait = self.args.rollout_health_check_interval
        first = wait + self.args.rollout_health_check_first_wait
        while not ray.wait([reference], timeout=min(first, self._watch.deadline.left_s()))[0]:
            first = wait
            self._watch.check()
            # A hook holds the whole process; or it died, which the next look at `reference` tells.
            with suppress(GetTimeoutError, RayActorError):
                silence = self._manager.remote.get(lambda m: m.silence(), timeout=_ANSWER_S)
                if silence:
                    self.recorder.message(silence)
            if self._engines.replace_failed() or self._engines.unsynced:
                self.updater.update_restarted()
            else:
                self._engines.restart_lost_router()
        return self._watch.get([reference], [self._manager])[0]
