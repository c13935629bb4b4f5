"""The driver's handle on the rollout side: the verbs of the loop, and engines that are replaced when they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import GetTimeoutError

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.core.types import EngineInfo, Probe, RolloutResult
from slime.diagnosis.exit_status import StopSignal
from slime.ray.engine_group import EngineCallError, EngineGroup
from slime.ray.remote import ACTOR_DIED
from slime.ray.watch import Member, StallError, Watch
from slime.ray.weight_updater import WeightUpdater
from slime.runlog.event_log import MAX_RANKS
from slime.runlog.recorder import Recorder
from slime.serving.external import ExternalGroup
from slime.serving.servers import check_probe, engine_memory

if TYPE_CHECKING:
    from slime.ray.rollout import RolloutManager

_RELEASE_TRIES = 5
_QUERY_S = 10.0
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
        self._warned_of: set[str] = set()  # datasets; "" for training

    def generate(self, rollout_id: int) -> RolloutResult:
        """Return the samples of one rollout, as one object per data-parallel rank, and its metrics."""
        self.begin(rollout_id)
        return self.finish()

    def begin(self, rollout_id: int) -> None:
        """Start generating a rollout in the background, until `finish`."""
        self._last_begun = rollout_id
        self._generating = self._manager.remote.call(lambda manager: manager.generate(rollout_id))

    def settle(self) -> None:
        """Wait for the rollout begun last, so that one version of the weights generates all of it."""
        if self._generating is not None:
            with self.recorder.phase("generate"), self.stop_signal.interruptible():
                self._watched(self._generating)

    def finish(self) -> RolloutResult:
        """Return the rollout begun last."""
        assert self._generating is not None, "`begin` comes first"
        with self.recorder.phase("generate"), self.stop_signal.interruptible():
            result = self._watched(self._generating)
            memory = engine_memory(self._engines.infos[:MAX_RANKS])
            self._engines.release()
        self._generating = None
        self.recorder.add(result.metrics)
        self.recorder.add_activities({"rollout": result.activity, **memory})
        failed, samples = (result.metrics.get(f"rollout/{k}", 0) for k in ("failed", "samples"))
        if failed:
            self._warn_once(
                "", f"{failed:.0f} of {samples:.0f} samples of rollout {self._last_begun}"
            )
        return result

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
        """Save the state after `rollout_id`, even if the next rollout is being generated."""
        begun = self._last_begun is not None and self._last_begun > rollout_id
        self._watch.call(
            self._manager, lambda manager: manager.save(path, rollout_id, before_generate=begun)
        )

    def stop_engines(self) -> None:
        self._engines.stop()

    def _warn_once(self, dataset: str, which: str) -> None:
        """Warn the first time; the metric counts failures in every rollout."""
        if dataset not in self._warned_of:
            self._warned_of.add(dataset)
            log = Path(self.args.run_dir) / "logs" / "rollout.log"
            self.recorder.message(f"warning: {which} failed and do not count; see {log}")

    def _watched(self, reference: ray.ObjectRef[T]) -> T:
        """Wait for the result; replace engines that fail and give them the current weights."""
        wait = self.args.rollout_health_check_interval
        first = wait + self.args.rollout_health_check_first_wait
        while not ray.wait([reference], timeout=min(first, self._watch.deadline.left_s()))[0]:
            first = wait
            self._watch.check()
            # The process is blocked by a hook, or it died, which the next `ray.wait` reports.
            with suppress(GetTimeoutError, *ACTOR_DIED):
                warning = self._manager.remote.get(lambda m: m.stall_warning(), timeout=_QUERY_S)
                if warning:
                    self.recorder.message(warning, kind="stall")
            if self._engines.replace_failed() or self._engines.unsynced:
                self.updater.update_restarted()
            else:
                self._engines.restart_lost_router()
        return self._watch.get([reference], [self._manager])[0]


class Engines:
    """Restarts engines and keeps the rollout manager's list of them; `group` has been started.

    The manager gets only engines that hold the current weights and sends requests to no others.
    """

    def __init__(
        self,
        args: Args,
        group: EngineGroup | ExternalGroup,
        manager: Member[RolloutManager],
        recorder: Recorder,
        watch: Watch,
    ):
        self.args, self._group, self._manager = args, group, manager
        self._recorder, self._watch = recorder, watch
        self._watch.add(group.members)

    def __bool__(self) -> bool:
        return self._group.count > 0

    @property
    def infos(self) -> list[EngineInfo]:
        """Engines that are up and receive weights."""
        return self._group.infos

    @property
    def unsynced(self) -> list[EngineInfo]:
        """Engines that were restarted and hold no weights of this run yet."""
        return self._group.unsynced

    def wait(self) -> None:
        """Return once every engine answers."""
        try:
            self._group.wait(self._on_start_message)
        except StallError as error:
            error.args = (f"{error}\n{self._group.last_log_lines()}",)
            raise
        self.admit()

    def admit(self) -> None:
        """Let all engines generate: every one of them holds the current weights."""
        self._group.admit()
        self._generate_with(self._group.serving)

    def set_version(self, version: int, rollout_id: int | None) -> None:
        """Tell the manager that engines hold the weights after `rollout_id` (None: the first ones)."""
        following = None if rollout_id is None else rollout_id + 1
        self._watch.call(
            self._manager, lambda manager: manager.set_weight_version(version, following)
        )

    def replace_failed(
        self,
        *,
        paused: bool = False,
        known: Sequence[int] = (),
        before: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """Restart engines that died or hang, and the `known` ones, on which a call failed.

        They get no request before they have the current weights. `paused`: a failed update left
        generation paused. `before` is called first if there are any.
        """
        if not self.args.use_fault_tolerance:
            return []
        failed = sorted({*self._group.failed(paused=paused), *known})
        if failed:
            self._generate_with(
                [
                    info
                    for i, info in enumerate(self._group.all)
                    if i not in failed and info not in self._group.unsynced
                ]
            )
            before()
        for index in failed:
            tell = partial(self._recorder.message, kind="engine")
            tell(self._group.restart(index, tell))
        return failed

    def restart_lost_router(self) -> None:
        if self._group.router_lost():
            self._recorder.message("the router ended and is restarted", kind="engine")
            self._generate_with(self._group.serving)

    def release(self) -> None:
        """Free the engines' memory for the trainer; engines replaced here get weights in the next update."""
        for attempt in range(_RELEASE_TRIES):
            try:
                return self._group.release()
            except EngineCallError as error:
                last = attempt == _RELEASE_TRIES - 1
                if last or not self.replace_failed(known=error.engines):
                    raise UserError(str(error)) from error

    def resume(self, tag: str) -> None:
        """Allocate released memory again: "weights" or "kv_cache"."""
        self._group.resume(tag)

    def interrupt(self) -> None:
        """Abort all requests; `slime/rollout/sampling.py` sends them again once engines are admitted."""
        self._generate_with([])
        with suppress(EngineCallError):  # of engines that died meanwhile: `release` replaces them
            self._group.abort_requests()

    def check_probe(self, probe: Probe | None) -> None:
        """Compare log-probs of the probe's tokens on engines whose checksums do not cover everything."""
        for engine in self._group.infos:
            alone = engine.role == "regular"  # prefill and decode engines work only as a pair
            if probe is not None and engine.kind == "sglang" and alone:
                check_probe(engine, probe)

    def stop(self) -> None:
        self._group.stop()

    def _generate_with(self, engines: list[EngineInfo]) -> None:
        models = self._group.route(engines)
        self._watch.call(self._manager, lambda manager: manager.set_engines(models))

    def _on_start_message(self, text: str) -> None:
        self._recorder.message(text)
        self._watch.check()
