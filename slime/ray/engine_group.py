"""All engines of a run: started together, found again after one died, told to free or take memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import ray

from slime.ray.health import failed_engines
from slime.ray.remote import Remote
from slime.utils.arguments import Args
from slime.utils.env import read_env
from slime.utils.sync_http import post_json
from slime.utils.types import EngineInfo

_CONTROL_TIMEOUT_S = 120


class EngineGroup:
    def __init__(self, args: Args, options: list[dict], *, token: str):
        self.args, self.options, self.token = args, options, token
        self.infos: list[EngineInfo] = []
        self._actors: list[Remote] = []
        self._starting: list[ray.ObjectRef] = []
        self._released = False

    def start(self) -> None:
        """Have every server started; `wait` says when they are up."""
        self._actors = [self._make(index) for index in range(len(self.options))]
        self._starting = [actor.call("start") for actor in self._actors]

    def wait(self) -> None:
        self.infos = ray.get(self._starting)

    @property
    def urls(self) -> list[str]:
        return [info.url for info in self.infos]

    def failed(self) -> list[int]:
        """Engines that died or hang."""
        timeout = self.args.rollout_health_check_timeout
        return failed_engines(self._actors, self.infos, timeout=timeout)

    def restart(self, index: int) -> None:
        """A fresh server in the place of a failed one; it holds `--hf-checkpoint` until the next update."""
        with suppress(ray.exceptions.RayActorError):
            self._actors[index].get("stop")
        self._actors[index].kill()
        self._actors[index] = self._make(index)
        self.infos[index] = self._actors[index].get("start")

    def release(self) -> None:
        """Give the device's memory to the trainer; the engines must be idle."""
        if self.args.offload_rollout and self.infos and not self._released:
            self._post_all("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self._released = True

    def resume(self, tag: str) -> None:
        if self._released:
            self._post_all("/resume_memory_occupation", {"tags": [tag]})
            self._released = tag != "kv_cache"

    def stop(self) -> None:
        for stopping in [actor.call("stop") for actor in self._actors]:
            with suppress(ray.exceptions.RayActorError):
                ray.get(stopping)
        for actor in self._actors:
            actor.kill()
        self._actors, self.infos = [], []

    def _make(self, index: int) -> Remote:
        host = read_env().host_ip or "127.0.0.1"
        path = "slime.ray.engine_actor.EngineActor"
        return Remote(self.options[index], path, self.args, index, host)

    def _post_all(self, route: str, body: dict) -> None:
        with ThreadPoolExecutor(len(self.infos)) as pool:
            calls = [
                pool.submit(
                    post_json, info.url + route, body, token=self.token, timeout=_CONTROL_TIMEOUT_S
                )
                for info in self.infos
            ]
            for call in calls:
                call.result()
