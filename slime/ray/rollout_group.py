"""The driver's handle on the rollout side: the verbs of the loop, timed and recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from slime.ray.recorder import Recorder
from slime.ray.remote import Remote
from slime.ray.stop_signal import StopSignal
from slime.utils.arguments import Args
from slime.utils.types import EngineInfo

_THREADS = 4  # generate, and a save or a question meanwhile


class RolloutGroup:
    def __init__(
        self,
        args: Args,
        *,
        engine_options: list[dict],
        env: dict[str, str],
        token: str,
        recorder: Recorder,
        stop_signal: StopSignal,
    ):
        self.args, self.recorder, self.stop_signal = args, recorder, stop_signal
        self.has_engines = bool(engine_options)
        self.engine_restarts = 0
        # Set by the run: gives the current weights to engines that were started again.
        self.push_weights: Callable[[list[EngineInfo]], None] = lambda engines: None
        self._last_begun: int | None = None
        options = {"num_cpus": 0, "max_concurrency": _THREADS, "runtime_env": {"env_vars": env}}
        path = "slime.ray.rollout.RolloutManager"
        self._manager = Remote(options, path, args, engine_options, token)

    def start(self) -> Any:
        """A reference that is ready when every engine answers."""
        return self._manager.call("start_engines")

    def generate(self, rollout_id: int) -> list[Any]:
        """Samples of one rollout as one object per data-parallel rank."""
        self._last_begun = rollout_id
        with self.recorder.phase("generate"), self.stop_signal.interruptible():
            result = self._watched(self._manager.call("generate", rollout_id))
        self.recorder.add(result.metrics)
        return result.batch_refs

    def eval(self, rollout_id: int) -> None:
        """Score the evaluation datasets with the weights after `rollout_id` (-1: before training)."""
        if not self.has_engines or not self.args.eval_datasets:
            return
        with self.recorder.phase("eval"), self.stop_signal.interruptible():
            self.recorder.add(self._watched(self._manager.call("eval", rollout_id)))

    def engine_infos(self) -> list[EngineInfo]:
        """Where the engines are; one that failed since the last call has been replaced."""
        self._replace_failed()
        return self._manager.get("engine_infos")

    def admit_engines(self) -> None:
        self._manager.get("admit_engines")

    def resume(self, tag: str) -> None:
        self._manager.get("resume", tag)

    def set_parallel(self, dp_size: int, cp_size: int) -> None:
        self._manager.get("set_parallel", dp_size, cp_size)

    def save(self, path: str, rollout_id: int) -> None:
        """The state after `rollout_id`, also when the next rollout is being generated already."""
        begun = self._last_begun is not None and self._last_begun > rollout_id
        self._manager.get("save", path, rollout_id, before_generate=begun)

    def load(self, path: str, rollout_id: int) -> None:
        self._manager.get("load", path, rollout_id)

    def stop_engines(self) -> None:
        self._manager.get("stop")

    def stop(self) -> None:
        # Should it be gone already, its engines ended with their parents.
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            self._manager.get("stop", timeout=60)
        self._manager.kill()

    def _watched(self, reference: Any) -> Any:
        """The result; meanwhile engines that fail are replaced, and given the current weights."""
        wait = self.args.rollout_health_check_interval
        first = wait + self.args.rollout_health_check_first_wait
        while not ray.wait([reference], timeout=first)[0]:
            first = wait
            failed = self._replace_failed()
            if failed:
                infos = self._manager.get("engine_infos")
                self.push_weights([infos[index] for index in failed])
                self.admit_engines()
        return ray.get(reference)

    def _replace_failed(self) -> list[int]:
        if not self.args.use_fault_tolerance:
            return []
        failed = self._manager.get("replace_failed_engines")
        for index in failed:
            self.recorder.message(f"engine {index} failed and was started again")
        self.engine_restarts += len(failed)
        return failed
