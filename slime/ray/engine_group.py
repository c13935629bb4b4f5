"""The engines that a run starts: start together, restart one by one, release and resume memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ray.exceptions import RayError

from slime.config.arguments import Args
from slime.config.engine_groups import engines_of
from slime.core.errors import UserError
from slime.core.types import EngineInfo, ModelAddress
from slime.ray.engine_actor import EngineHandle
from slime.ray.remote import ACTOR_DIED
from slime.ray.watch import LostError, Member, first_line
from slime.serving.external import ExternalGroup
from slime.serving.router import ExternalRouter, Router, make_router
from slime.serving.servers import failed_engines, flush_until_idle, health_route
from slime.utils.addresses import own_host
from slime.utils.concurrency import run_all, start_in_thread
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import HttpError, post_json

_CONTROL_TIMEOUT_S = 120
_MESSAGE_EVERY_S = 20.0
_START_RETRIES = 3  # for all engines together: actors that die repeatedly have a cause
# SGLang decodes one step ahead of its results and unmaps its cache without waiting for that step: on an H200
# one release in seventy ended in an illegal memory access.
_LAST_STEP_S = 0.3
_MEMORY = ("kv_cache", "weights")


class EngineCallError(HttpError):
    """A control call failed; `engines` are the indices of the engines to replace."""

    def __init__(self, message: str, engines: list[int]) -> None:
        super().__init__(message)
        self.engines = engines


def make_engine_group(
    args: Args, options: list[list[dict[str, Any]]], *, token: str
) -> EngineGroup | ExternalGroup:
    if args.rollout_external:
        return ExternalGroup(args, token=token)
    return EngineGroup(args, options, token=token)


class EngineGroup:
    """`options`: for each engine Ray's options of each of its GPUs.

    Engines of frozen models are started, checked, replaced and offloaded like all others, but never receive
    weights.
    """

    def __init__(self, args: Args, options: list[list[dict[str, Any]]], *, token: str):
        self.args, self.options, self.token = args, options, token
        self.unsynced: list[EngineInfo] = []  # restarted, still without the current weights
        self.all: list[EngineInfo] = []
        self._down: set[int] = set()  # not restarted yet
        self._specs = engines_of(args)[: len(options)]
        self._routers: dict[str, Router | ExternalRouter] = {}  # by model
        self._handles: list[EngineHandle] = []
        self._starting: list[Future[EngineInfo]] = []
        self._start_retries = _START_RETRIES
        self._released: dict[str, set[str]] = {}  # url -> tags of released memory

    def start(self) -> None:
        """Start every server in the background; `wait` returns when they are up."""
        self._handles = [
            EngineHandle(spec.args, index, options)
            for index, (spec, options) in enumerate(zip(self._specs, self.options, strict=True))
        ]
        self._starting = [start_in_thread(handle.start) for handle in self._handles]

    def wait(self, notify: Callable[[str], None] = lambda text: None) -> None:
        """Return once every engine answers; until then report the last log line of slow ones."""
        begun = time.monotonic()
        next_message = begun + _MESSAGE_EVERY_S
        while True:
            up = [self._is_up(index, notify) for index in range(len(self._starting))]
            if all(up):
                break
            time.sleep(0.05)
            if time.monotonic() > next_message:
                next_message += _MESSAGE_EVERY_S
                for index in self._not_up():
                    line = self._handles[index].last_lines(1)
                    notify(f"engine {index} is starting ({time.monotonic() - begun:.0f} s): {line}")
        self.all = [future.result() for future in self._starting]
        remember_key([info.url for info in self.all], self.token)

    def _is_up(self, index: int, notify: Callable[[str], None]) -> bool:
        """Restart an engine whose actor died; raise the error of a server that cannot start."""
        future = self._starting[index]
        if not future.done():
            return False
        error = future.exception()
        if not isinstance(error, ACTOR_DIED):
            future.result()
            return True
        what = f"engine {index} died while it started: {first_line(error)}"
        if not self.args.use_fault_tolerance or not self._start_retries:
            raise LostError(what) from error
        self._start_retries -= 1
        notify(f"{what} Starting it again")
        self._handles[index].stop()()
        self._handles[index].create_actors()
        self._starting[index] = start_in_thread(self._handles[index].start)
        return False

    def last_log_lines(self) -> str:
        """Return the end of the log of each server that is not up yet."""
        return "\n".join(
            f"engine {index} is not up; its log ends with\n{self._handles[index].last_lines(15)}"
            for index in self._not_up()
        )

    def _not_up(self) -> list[int]:
        return [index for index, future in enumerate(self._starting) if not future.done()]

    def members(self) -> list[Member]:
        return [member for handle in self._handles for member in handle.members()]

    @property
    def count(self) -> int:
        return len(self.all)

    @property
    def infos(self) -> list[EngineInfo]:
        """Engines that are up and receive weights."""
        return [self.all[index] for index in self._up() if self._specs[index].update_weights]

    @property
    def serving(self) -> list[EngineInfo]:
        """Engines that are up, of all models."""
        return [self.all[index] for index in self._up()]

    def _up(self) -> list[int]:
        return [index for index in range(len(self.all)) if index not in self._down]

    def failed(self, *, paused: bool = False) -> list[int]:
        """Return the indices of engines that died or hang."""
        timeout = self.args.rollout_health_check_timeout
        # SGLang's health check generates a token, which needs the memory it may have released.
        released = any(self._released.get(info.url) for info in self.serving)
        route = "/model_info" if released else health_route(paused)
        return failed_engines(self._handles, self.all, timeout=timeout, route=route)

    def restart(self, index: int, notify: Callable[[str], None] = lambda text: None) -> str:
        """Replace a failed server by a new one; return a line with the outcome.

        `notify` is called first, because a start takes from seconds to many minutes. The server holds the
        weights of its folder until the next update. After any
        error, including the actor's death, the engine stays down until the next health check retries.
        """
        if index not in self._down:
            notify(f"engine {index} failed: it died, hangs, or failed a call; restarting it")
        self.unsynced = [info for info in self.unsynced if info != self.all[index]]
        self._released.pop(self.all[index].url, None)
        self._handles[index].stop()()
        self._handles[index].create_actors()
        try:
            self.all[index] = self._handles[index].start()
            remember_key([self.all[index].url], self.token)
        except (UserError, RayError) as error:
            self._down.add(index)
            waits = "" if self.infos else "; no engine is left, so generation waits"
            return (
                f"engine {index} failed and could not be started again so far: "
                f"{first_line(error)}{waits}"
            )
        self._down.discard(index)
        if self._specs[index].update_weights:
            self.unsynced.append(self.all[index])
        return f"engine {index} failed and was started again"

    def admit(self) -> None:
        """Note that all engines hold the current weights."""
        self.unsynced = []

    def route(self, engines: list[EngineInfo]) -> dict[str, ModelAddress]:
        """Point the routers, if any, to these engines; return each model's address."""
        models = [self._specs[self.all.index(info)].model for info in engines]
        served = {
            spec.model: [i for i, m in zip(engines, models, strict=True) if m == spec.model]
            for spec in self._specs
        }
        return {
            model: ModelAddress(
                urls=[info.url for info in infos], router=self._route_one(model, infos)
            )
            for model, infos in served.items()
        }

    def _route_one(self, model: str, engines: list[EngineInfo]) -> str | None:
        if model not in self._routers:
            specs = [spec for spec in self._specs if spec.model == model]
            router = make_router(self.args, specs, own_host(), self.token)
            if router is None:
                return None
            self._routers[model] = router
        router = self._routers[model]
        if not router.alive():
            router.start()
        router.set_workers(engines)
        return router.url

    def router_lost(self) -> bool:
        return any(not router.alive() for router in self._routers.values())

    def release(self) -> None:
        """Release the device's memory to the trainer; the engines must be idle.

        Raise EngineCallError for engines that failed; all others have released theirs, or do so in the
        next call.
        """
        holding = [
            self.all[index]
            for index in self._up()
            if self._specs[index].args.offload_rollout
            and not self._released.get(self.all[index].url)
        ]
        if not holding:
            return
        self._on_each(holding, self._flush)
        if any(info.kind == "sglang" for info in holding):
            time.sleep(_LAST_STEP_S)
        self._on_each(holding, self._release_one)

    def abort_requests(self) -> None:
        self._on_each(
            self.serving, lambda info: self._post(info, "/abort_request", {"abort_all": True})
        )

    def resume(self, tag: str) -> None:
        """Allocate the released memory again.

        SGLang exits if told to resume more than it released, or if the memory is no longer free.
        """
        released = [info for info in self.serving if tag in self._released.get(info.url, ())]
        try:
            self._on_each(released, lambda info: self._resume_one(info, tag))
        except EngineCallError as error:
            raise EngineCallError(
                f"an engine could not allocate the memory it had released ({error}). Does another "
                "process use the same GPU (nvidia-smi)? If not, lower --sglang-mem-fraction-static. "
                f"Its log ends with\n{self._last_lines(error.engines)}",
                error.engines,
            ) from error

    def _flush(self, info: EngineInfo) -> None:
        timeout = self.args.rollout_health_check_timeout
        flush_until_idle(info.url, self.token, answer_timeout_s=timeout)

    def _release_one(self, info: EngineInfo) -> None:
        self._post(info, "/release_memory_occupation", {"tags": list(_MEMORY)})
        self._released[info.url] = set(_MEMORY)

    def _resume_one(self, info: EngineInfo, tag: str) -> None:
        self._post(info, "/resume_memory_occupation", {"tags": [tag]})
        self._released[info.url].discard(tag)

    def _post(self, info: EngineInfo, route: str, body: dict[str, object]) -> None:
        post_json(info.url + route, body, token=self.token, timeout=_CONTROL_TIMEOUT_S)

    def _on_each(self, engines: list[EngineInfo], call: Callable[[EngineInfo], None]) -> None:
        """Run `call` on all engines concurrently; a failure does not stop the remaining calls."""
        failed: dict[int, str] = {}
        for info, future in zip(engines, run_all(engines, call), strict=True):
            try:
                future.result()
            except HttpError as error:
                failed[self.all.index(info)] = str(error)
        if failed:
            raise EngineCallError("; ".join(failed.values()), list(failed))

    def _last_lines(self, engines: list[int]) -> str:
        return "\n".join(self._handles[index].last_lines(15) for index in engines)

    def stop(self) -> None:
        for router in self._routers.values():
            router.stop()
        for wait in [handle.stop() for handle in self._handles]:
            wait()
        self._handles, self.all = [], []
