"""Whether an engine still works: its processes live and its server answers in time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from slime.core.types import EngineInfo
from slime.utils.sync_http import HttpError, get_json


class HasProcesses(Protocol):
    def alive(self, timeout: float) -> bool: ...


def failed_engines(
    handles: Sequence[HasProcesses],
    infos: list[EngineInfo],
    *,
    timeout: float,
    route: str = "/health",
) -> list[int]:
    """Indices of the engines that are dead or hung."""
    if not handles:
        return []
    with ThreadPoolExecutor(len(handles)) as pool:
        checks = [
            pool.submit(_healthy, handle, info, timeout, route)
            for handle, info in zip(handles, infos, strict=True)
        ]
        healthy = [check.result() for check in checks]
    return [index for index, ok in enumerate(healthy) if not ok]


def health_route(paused: bool) -> str:
    """What a server that works answers in time.

    SGLang's /health generates a token, which a paused server does not; its /server_info asks the
    scheduler too, and is answered meanwhile.
    """
    return "/server_info" if paused else "/health"


def answers(url: str, timeout: float, route: str = "/health") -> bool:
    try:
        get_json(url + route, timeout=timeout, retries=0)
    except HttpError:
        return False
    return True


def _healthy(handle: HasProcesses, info: EngineInfo, timeout: float, route: str) -> bool:
    return handle.alive(timeout) and answers(info.url, timeout, route)
