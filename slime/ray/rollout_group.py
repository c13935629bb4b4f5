"""The driver's handle on the rollout side: the verbs of the loop, timed and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from slime.config.arguments import Args
from slime.core.errors import UserError, WeightMismatchError, WeightSyncError
from slime.core.reports import Probe, RolloutResult
from slime.core.types import EngineInfo
from slime.diagnosis.stop_signal import StopSignal
from slime.ray.actors import rollout_manager
from slime.ray.cluster import beside_driver
from slime.ray.engine_group import EngineCallError, make_engine_group
from slime.ray.recorder import Recorder
from slime.ray.remote import Remote
from slime.ray.stacks import Member
from slime.ray.watch import StallError
from slime.serving.probe_check import check_probe
from slime.utils.sync_http import HttpError

if TYPE_CHECKING:
    from slime.ray.rollout import RolloutManager

_UPDATE_TRIES = 5  # of one update, each with the engines that are left or were started again
_ANSWER_S = 10.0  # for a question that is answered at once
_THREADS = 4  # generate, and a save or a question meanwhile
T = TypeVar("T")


def _nothing() -> None: ...


class RolloutGroup:
    def __init__(
        self,
        args: Args,
        *,
        engine_options: list[list[dict]],  # by engine and GPU
        env: dict[str, str],
        token: str,
        recorder: Recorder,
        stop_signal: StopSignal,
    ):
        self.args, self.recorder, self.stop_signal = args, recorder, stop_signal
        self.has_engines = bool(engine_options) or args.rollout_external
        self._engines = make_engine_group(args, engine_options, token=token)
        self._engines.start()
        # Set by the run: gives the trainer's weights to engines that were started again; returns
        # their version and the rollout they were trained on last (None: those of the start).
        self.push_weights: Callable[[list[EngineInfo]], tuple[int, int | None]]
        self.never_stops = False  # whether the rollout function generates between rollouts too
        self._last_begun: int | None = None
        self._failures_told: set[str] = set()  # datasets; "" for training
        self._generating: ray.ObjectRef[RolloutResult] | None = None  # the rollout that was begun
        options = {
            "num_cpus": 0,
            "max_concurrency": _THREADS,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": beside_driver(),  # where the run folder is for certain
        }
        self._manager = Remote(options, rollout_manager, args, token)
        self._member = Member(label="rollout manager", remote=self._manager, log="rollout.log")
        self._watch = recorder.watch
        self._watch.add(lambda: [self._member, *self._engines.members()])

    def wait(self) -> None:
        """Until every engine answers."""
        try:
            self._engines.wait(self._hear_of_start)
        except StallError as error:
            error.args = (f"{error}\n{self._engines.last_words()}",)
            raise
        self.admit_engines()

    def _ask(self, method: Callable[[RolloutManager], T]) -> T:
        return self._watch.get([self._manager.call(method)], [self._member])[0]

    def _hear_of_start(self, text: str) -> None:
        self.recorder.message(text)
        self._watch.check()

    def generate(self, rollout_id: int) -> list[Any]:
        """Samples of one rollout as one object per data-parallel rank."""
        self.begin(rollout_id)
        return self.finish()

    def begin(self, rollout_id: int) -> None:
        """Have a rollout generated in the background, until `finish`."""
        self._last_begun = rollout_id
        self._generating = self._manager.call(lambda manager: manager.generate(rollout_id))

    def settle(self) -> None:
        """Wait for the rollout begun last, so that it is made by one version of the weights."""
        if self._generating is not None:
            with self.recorder.phase("generate"), self.stop_signal.interruptible():
                self._watched(self._generating)

    def finish(self) -> list[Any]:
        """The rollout begun last."""
        assert self._generating is not None, "`begin` comes first"
        with self.recorder.phase("generate"), self.stop_signal.interruptible():
            result = self._watched(self._generating)
            self._release()
        self._generating = None
        self.recorder.add(result.metrics)
        self._tell_of_failures(result.metrics)
        return result.batch_refs

    def _release(self) -> None:
        """Free the engines' memory for the trainer; the next update serves those replaced here."""
        for attempt in range(_UPDATE_TRIES):
            try:
                return self._engines.release()
            except EngineCallError as error:
                last = attempt == _UPDATE_TRIES - 1
                if last or not self.replace_failed(known=error.engines):
                    raise UserError(str(error)) from error

    def _tell_of_failures(self, metrics: dict[str, float]) -> None:
        """The first time; the metric counts them in every rollout."""
        failed, samples = metrics.get("rollout/failed", 0), metrics.get("rollout/samples", 0)
        if failed:
            self._tell_once(
                "", f"{failed:.0f} of {samples:.0f} samples of rollout {self._last_begun}"
            )

    def _tell_once(self, dataset: str, which: str) -> None:
        if dataset not in self._failures_told:
            self._failures_told.add(dataset)
            log = Path(self.args.run_dir) / "logs" / "rollout.log"
            self.recorder.message(f"warning: {which} failed and do not count; why is in {log}")

    def eval(self, rollout_id: int) -> None:
        """Score the evaluation datasets with the weights after `rollout_id` (-1: before training)."""
        if self.args.debug_train_only:  # which starts no engine
            return
        with self.recorder.phase("eval"), self.stop_signal.interruptible():
            metrics = self._watched(self._manager.call(lambda manager: manager.eval(rollout_id)))
        self.recorder.add(metrics)
        for name in sorted(
            name for name, value in metrics.items() if value and _counts_failed(name)
        ):
            dataset = name.removeprefix("eval/").removesuffix("/failed")
            self._tell_once(dataset, f"{metrics[name]:.0f} samples of the evaluation on {dataset}")

    @property
    def engine_infos(self) -> list[EngineInfo]:
        return self._engines.infos

    def check_probe(self, probe: Probe | None) -> None:
        """Whether every engine computes what the trainer does."""
        for engine in self._engines.infos:
            if probe is not None and engine.kind == "sglang":
                check_probe(engine, probe)

    def admit_engines(self) -> None:
        """Every engine holds the current weights: all of them may generate."""
        self._engines.admit()
        self._generate_with(self._engines.infos)

    def set_weight_version(self, version: int, rollout_id: int | None) -> None:
        """Every engine holds the weights after `rollout_id` (None: those the run started with)."""
        following = None if rollout_id is None else rollout_id + 1
        self._ask(lambda manager: manager.set_weight_version(version, following))

    def replace_failed(self, *, paused: bool = False, known: Sequence[int] = ()) -> list[int]:
        """Restart engines that died or hang, and the `known` ones, on which a call failed.

        They get no request before they have the current weights. `paused`: generation is, as an update
        that failed leaves it.
        """
        if not self.args.use_fault_tolerance:
            return []
        failed = sorted({*self._engines.failed(paused=paused), *known})
        if failed:
            self._generate_with(
                [
                    info
                    for i, info in enumerate(self._engines.all)
                    if i not in failed and info not in self._engines.unsynced
                ]
            )
        for index in failed:
            self.recorder.message(self._engines.restart(index, self.recorder.message))
        return failed

    def _bring_up_to_date(self) -> None:
        """Give engines that were started again the trainer's weights; one may fail even then."""
        version, after = self.retry_update(lambda: self.push_weights(self._engines.unsynced))
        if after is not None:
            self.set_weight_version(version, after)
        self.admit_engines()

    def retry_update(self, update: Callable[[], T], undo: Callable[[], None] = _nothing) -> T:
        """Run an update, and again from its start as long as it fails because an engine did.

        `undo` is called before engines are replaced. An update that did not reach an engine is tried
        once more even if all of them answer now: one that was frozen and went on takes it again.
        """
        for attempt in range(_UPDATE_TRIES):
            try:
                return update()
            except (RayTaskError, HttpError) as error:
                if isinstance(error, WeightMismatchError) or attempt == _UPDATE_TRIES - 1:
                    raise
                undo()
                known = error.engines if isinstance(error, EngineCallError) else ()
                replaced = self.replace_failed(paused=True, known=known)
                unreached = isinstance(error, (HttpError, WeightSyncError)) and attempt == 0
                if not replaced and not (unreached and self.args.use_fault_tolerance):
                    raise
        raise AssertionError("unreachable")

    def _generate_with(self, engines: list[EngineInfo]) -> None:
        urls = [engine.url for engine in engines]
        router = self._engines.route(urls)
        self._ask(lambda manager: manager.set_engines(urls, router))

    def resume(self, tag: str) -> None:
        self._engines.resume(tag)

    def set_parallel(self, dp_size: int, cp_size: int) -> None:
        self._ask(lambda manager: manager.set_parallel(dp_size, cp_size))

    def save(self, path: str, rollout_id: int) -> None:
        """The state after `rollout_id`, also when the next rollout is being generated already."""
        begun = self._last_begun is not None and self._last_begun > rollout_id
        self._ask(lambda manager: manager.save(path, rollout_id, before_generate=begun))

    def load(self, path: str, rollout_id: int) -> None:
        self._ask(lambda manager: manager.load(path, rollout_id))

    def stop_engines(self) -> None:
        self._engines.stop()

    def stop(self) -> None:
        self._engines.stop()
        self._manager.kill()

    def _watched(self, reference: ray.ObjectRef[T]) -> T:
        """The result; meanwhile engines that fail are replaced, and given the current weights."""
        wait = self.args.rollout_health_check_interval
        first = wait + self.args.rollout_health_check_first_wait
        while not ray.wait([reference], timeout=min(first, self._watch.left_s()))[0]:
            first = wait
            self._watch.check()
            # A hook holds the whole process; or it died, which the next look at `reference` tells.
            with suppress(GetTimeoutError, RayActorError):
                silence = self._manager.get(lambda manager: manager.silence(), timeout=_ANSWER_S)
                if silence:
                    self.recorder.message(silence)
            if self.replace_failed() or self._engines.unsynced:
                self._bring_up_to_date()
            elif self._engines.router_lost():
                self.recorder.message("the router ended and is started again")
                self._generate_with(self._engines.infos)
        return self._watch.get([reference], [self._member])[0]


def _counts_failed(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/failed")
