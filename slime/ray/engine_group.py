"""All engines of a run: started together, found again after one died, told to free or take memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from slime.backends.sglang_utils.flush import flush_until_idle
from slime.ray.engine_handle import EngineHandle
from slime.ray.health import failed_engines
from slime.utils.arguments import Args
from slime.utils.sync_http import post_json
from slime.utils.types import EngineInfo

_CONTROL_TIMEOUT_S = 120
_WORD_EVERY_S = 20.0


class EngineGroup:
    """`options`: for each engine Ray's options of each of its GPUs."""

    def __init__(self, args: Args, options: list[list[dict[str, Any]]], *, token: str):
        self.args, self.options, self.token = args, options, token
        self.infos: list[EngineInfo] = []
        self._handles: list[EngineHandle] = []
        self._starting: list[Future[EngineInfo]] = []
        self._released: set[str] = set()

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
        while waiting := [i for i, future in enumerate(self._starting) if not future.done()]:
            for future in self._starting:
                if future.done():
                    future.result()
            time.sleep(0.05)
            if time.monotonic() > next_word:
                next_word += _WORD_EVERY_S
                for index in waiting:
                    line = self._handles[index].last_line()
                    say(f"engine {index} is starting ({time.monotonic() - begun:.0f} s): {line}")
        self.infos = [future.result() for future in self._starting]

    @property
    def urls(self) -> list[str]:
        return [info.url for info in self.infos]

    def failed(self) -> list[int]:
        """Engines that died or hang."""
        timeout = self.args.rollout_health_check_timeout
        return failed_engines(self._handles, self.infos, timeout=timeout)

    def restart(self, index: int) -> None:
        """A fresh server in the place of a failed one; it holds `--hf-checkpoint` until the next update."""
        self._handles[index].stop()()
        self._handles[index].make()
        self.infos[index] = self._handles[index].start()

    def release(self) -> None:
        """Give the device's memory to the trainer; the engines must be idle."""
        if self.args.offload_rollout and self.infos and not self._released:
            for info in self.infos:
                flush_until_idle(info.url, self.token)
            self._post_all("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
            self._released = {"kv_cache", "weights"}

    def resume(self, tag: str) -> None:
        if tag in self._released:
            self._post_all("/resume_memory_occupation", {"tags": [tag]})
            self._released.discard(tag)

    def stop(self) -> None:
        for wait in [handle.stop() for handle in self._handles]:
            wait()
        self._handles, self.infos = [], []

    def _post_all(self, route: str, body: dict[str, Any]) -> None:
        with ThreadPoolExecutor(len(self.infos)) as pool:
            calls = [
                pool.submit(
                    post_json, info.url + route, body, token=self.token, timeout=_CONTROL_TIMEOUT_S
                )
                for info in self.infos
            ]
            for call in calls:
                call.result()
