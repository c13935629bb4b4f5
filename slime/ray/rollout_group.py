"""The driver's handle on the rollout side: the verbs of the loop, timed and recorded."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from slime.ray.recorder import Recorder
from slime.ray.rollout import RolloutManager
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
        self._last_begun: int | None = None
        actor_class = ray.remote(RolloutManager).options(
            num_cpus=0, max_concurrency=_THREADS, runtime_env={"env_vars": env}
        )
        self._manager = actor_class.remote(args, engine_options, token)

    def start(self) -> Any:
        """A reference that is ready when every engine answers."""
        return self._manager.start_engines.remote()

    def generate(self, rollout_id: int) -> list[Any]:
        """Samples of one rollout as one object per data-parallel rank."""
        self._last_begun = rollout_id
        with self.recorder.phase("generate"), self.stop_signal.interruptible():
            result = ray.get(self._manager.generate.remote(rollout_id))
        self.recorder.add(result.metrics)
        return result.batch_refs

    def eval(self, rollout_id: int) -> None:
        """Score the evaluation datasets with the weights after `rollout_id` (-1: before training)."""
        if not self.has_engines or not self.args.eval_datasets:
            return
        with self.recorder.phase("eval"), self.stop_signal.interruptible():
            self.recorder.add(ray.get(self._manager.eval.remote(rollout_id)))

    def engine_infos(self) -> list[EngineInfo]:
        """Where the engines are; one that died since the last call has been replaced."""
        for index in ray.get(self._manager.replace_dead_engines.remote()):
            self.recorder.message(f"engine {index} had died and was started again")
        return ray.get(self._manager.engine_infos.remote())

    def num_prompts(self) -> int:
        return ray.get(self._manager.num_prompts.remote())

    def resume(self, tag: str) -> None:
        ray.get(self._manager.resume.remote(tag))

    def set_parallel(self, dp_size: int, cp_size: int) -> None:
        ray.get(self._manager.set_parallel.remote(dp_size, cp_size))

    def save(self, path: str, rollout_id: int) -> None:
        """The state after `rollout_id`, also when the next rollout is being generated already."""
        begun = self._last_begun is not None and self._last_begun > rollout_id
        ray.get(self._manager.save.remote(path, rollout_id, before_generate=begun))

    def load(self, path: str, rollout_id: int) -> None:
        ray.get(self._manager.load.remote(path, rollout_id))

    def stop(self) -> None:
        # Should it be gone already, its engines ended with their parents.
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(self._manager.stop.remote(), timeout=60)
        ray.kill(self._manager)
