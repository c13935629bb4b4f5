"""Engines somebody else runs: never started or ended here, only asked, updated and left out while silent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from slime.config.arguments import Args
from slime.core.types import EngineInfo
from slime.ray.stacks import Member
from slime.serving.external import find_external, normalise, version_warning
from slime.serving.health import answers, health_route
from slime.utils.engine_keys import remember_key


class ExternalGroup:
    """The same to its user as EngineGroup."""

    def __init__(self, args: Args, *, token: str):
        self.args, self.token = args, token
        self.unsynced: list[EngineInfo] = []
        self.all: list[EngineInfo] = []
        self._silent: set[int] = set()

    def start(self) -> None:
        """They run already."""

    def wait(self, say: Callable[[str], None] = lambda text: None) -> None:
        remember_key(map(normalise, self.args.rollout_external_engine_addrs or ()), self.token)
        self.all = find_external(self.args)
        for info in self.all:
            say(f"{info.kind} engine at {info.url} (version {info.version})")
        if warning := version_warning(self.all):
            say(warning)

    def last_words(self) -> str:
        """They are up, or the run ends at once."""
        return ""

    @property
    def count(self) -> int:
        return len(self.all)

    def members(self) -> list[Member]:
        """None of them is a process of this run."""
        return []

    @property
    def infos(self) -> list[EngineInfo]:
        return [info for index, info in enumerate(self.all) if index not in self._silent]

    def failed(self, *, paused: bool = False) -> list[int]:
        timeout, route = self.args.rollout_health_check_timeout, health_route(paused)
        with ThreadPoolExecutor(max(1, self.count)) as pool:
            healthy = list(pool.map(lambda info: answers(info.url, timeout, route), self.all))
        return [i for i, ok in enumerate(healthy) if not ok or i in self._silent]

    def restart(self, index: int, say: Callable[[str], None] = lambda text: None) -> str:
        """Take an engine out that does not answer, or back in when it does again."""
        info = self.all[index]
        self.unsynced = [other for other in self.unsynced if other != info]
        route = health_route(paused=index in self._silent)  # an update may have left it so
        if not answers(info.url, self.args.rollout_health_check_timeout, route):
            self._silent.add(index)
            return f"the engine at {info.url} does not answer; going on without it"
        self._silent.discard(index)
        self.unsynced.append(info)
        return f"the engine at {info.url} answers again"

    def admit(self) -> None:
        """All of them hold the current weights."""
        self.unsynced = []

    def route(self, urls: list[str]) -> str | None:
        """Requests go to the engines directly."""
        return None

    def router_lost(self) -> bool:
        return False

    def release(self) -> None:
        """Their memory is their owner's."""

    def resume(self, tag: str) -> None: ...

    def stop(self) -> None:
        self.all, self.unsynced = [], []
