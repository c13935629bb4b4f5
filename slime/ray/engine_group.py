"""All engines of a run: started together, found again after one died, told to free or take memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from slime.backends.addresses import own_host
from slime.backends.sglang_utils.flush import flush_until_idle
from slime.backends.sglang_utils.router import Router, make_router
from slime.ray.engine_handle import EngineHandle
from slime.ray.external_group import ExternalGroup
from slime.ray.health import failed_engines, health_route
from slime.ray.stacks import Member
from slime.utils.arguments import Args
from slime.utils.errors import UserError
from slime.utils.sync_http import HttpError, post_json
from slime.utils.types import EngineInfo

_CONTROL_TIMEOUT_S = 120
_WORD_EVERY_S = 20.0
# SGLang decodes one step ahead of what it reads, and unmaps its cache without waiting for that step: seen
# on an H200 as an illegal memory access in one release of seventy.
_LAST_STEP_S = 0.3
_MEMORY = ("kv_cache", "weights")


def make_engine_group(
    args: Args, options: list[list[dict[str, Any]]], *, token: str
) -> EngineGroup | ExternalGroup:
    return ExternalGroup(args) if args.rollout_external else EngineGroup(args, options, token=token)


class EngineGroup:
    """`options`: for each engine Ray's options of each of its GPUs."""

    def __init__(self, args: Args, options: list[list[dict[str, Any]]], *, token: str):
        self.args, self.options, self.token = args, options, token
        self.unsynced: list[EngineInfo] = []  # started again, without the current weights so far
        self.all: list[EngineInfo] = []
        self._down: set[int] = set()  # could not be started again, so far
        self._router: Router | None = None
        self._handles: list[EngineHandle] = []
        self._starting: list[Future[EngineInfo]] = []
        self._released: dict[str, set[str]] = {}  # url -> what it gave away; a new engine: nothing

    def start(self) -> None:
        """Have every server started; `wait` says when they are up."""
        self._handles = [EngineHandle(self.args, i, o) for i, o in enumerate(self.options)]
        pool = ThreadPoolExecutor(max(1, len(self._handles)), thread_name_prefix="engine-start")
        self._starting = [pool.submit(handle.start) for handle in self._handles]
        pool.shutdown(wait=False)

    def wait(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Until every engine answers; meanwhile `say` hears what the slow ones are doing."""
        begun = time.monotonic()
        next_word = begun + _WORD_EVERY_S
        while waiting := self._not_up():
            for future in self._starting:
                if future.done():
                    future.result()
            time.sleep(0.05)
            if time.monotonic() > next_word:
                next_word += _WORD_EVERY_S
                for index in waiting:
                    line = self._handles[index].last_lines(1)
                    say(f"engine {index} is starting ({time.monotonic() - begun:.0f} s): {line}")
        self.all = [future.result() for future in self._starting]

    def last_words(self) -> str:
        """Of the servers that are not up yet."""
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
        """Engines that are up."""
        return [info for index, info in enumerate(self.all) if index not in self._down]

    def failed(self, *, paused: bool = False) -> list[int]:
        """Engines that died or hang."""
        timeout = self.args.rollout_health_check_timeout
        # SGLang's health check generates a token, which needs the memory it may have given away.
        route = "/model_info" if self._gave_away() else health_route(paused)
        return failed_engines(self._handles, self.all, timeout=timeout, route=route)

    def restart(self, index: int) -> str:
        """A fresh server in the place of a failed one, and what became of it in words.

        It holds `--hf-checkpoint` until the next update.
        """
        self.unsynced = [info for info in self.unsynced if info != self.all[index]]
        self._handles[index].stop()()
        self._handles[index].make()
        try:
            self.all[index] = self._handles[index].start()
        except UserError as error:
            self._down.add(index)
            reason = str(getattr(error, "cause", error)).splitlines()[0]  # not Ray's traceback
            waits = "" if self.infos else "; no engine is left, so generation waits"
            return f"engine {index} failed and could not be started again so far: {reason}{waits}"
        self._down.discard(index)
        self.unsynced.append(self.all[index])
        return f"engine {index} failed and was started again"

    def admit(self) -> None:
        """All of them hold the current weights."""
        self.unsynced = []

    def route(self, urls: list[str]) -> str | None:
        """Have the router, where there is one, use these engines; its address."""
        if self._router is None:
            self._router = make_router(self.args, len(self._handles), own_host())
        if self._router is None:
            return None
        if not self._router.alive():
            self._router.start()
        self._router.set_workers(urls)
        return self._router.url

    def router_lost(self) -> bool:
        return self._router is not None and not self._router.alive()

    def release(self) -> None:
        """Give the device's memory to the trainer; the engines must be idle."""
        if not self.args.offload_rollout or self._gave_away():
            return
        for info in self.infos:
            flush_until_idle(info.url, self.token)
        if any(info.kind == "sglang" for info in self.infos):
            time.sleep(_LAST_STEP_S)
        self._post(self.infos, "/release_memory_occupation", {"tags": list(_MEMORY)})
        self._released = {info.url: set(_MEMORY) for info in self.infos}

    def resume(self, tag: str) -> None:
        """Take back what was given away; SGLang ends itself if it is asked for more than that, or if
        the memory is not free any more."""
        without = [info for info in self.infos if tag in self._released.get(info.url, ())]
        try:
            self._post(without, "/resume_memory_occupation", {"tags": [tag]})
        except HttpError as error:
            raise HttpError(
                f"an engine could not take back the memory it had given away ({error}). Does another "
                "process use the same GPU (nvidia-smi)? If not, lower --sglang-mem-fraction-static. "
                f"Its log ends with\n{self._last_lines()}"
            ) from error
        for info in without:
            self._released[info.url].discard(tag)

    def _last_lines(self) -> str:
        return "\n".join(handle.last_lines(15) for handle in self._handles)

    def _gave_away(self) -> bool:
        return any(self._released.get(info.url) for info in self.infos)

    def stop(self) -> None:
        if self._router is not None:
            self._router.stop()
        for wait in [handle.stop() for handle in self._handles]:
            wait()
        self._handles, self.all = [], []

    def _post(self, engines: list[EngineInfo], route: str, body: dict[str, Any]) -> None:
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            calls = [
                pool.submit(
                    post_json, info.url + route, body, token=self.token, timeout=_CONTROL_TIMEOUT_S
                )
                for info in engines
            ]
            for call in calls:
                call.result()
