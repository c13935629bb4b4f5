"""Whether an engine still works: its process lives and its server answers in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ray

from slime.ray.remote import Remote
from slime.utils.sync_http import HttpError, get_json
from slime.utils.types import EngineInfo


def failed_engines(actors: list[Remote], infos: list[EngineInfo], *, timeout: float) -> list[int]:
    """Indices of the engines that are dead or hung."""
    if not actors:
        return []
    with ThreadPoolExecutor(len(actors)) as pool:
        healthy = list(
            pool.map(lambda pair: _healthy(*pair, timeout), zip(actors, infos, strict=True))
        )
    return [index for index, ok in enumerate(healthy) if not ok]


def _healthy(actor: Remote, info: EngineInfo, timeout: float) -> bool:
    try:
        if not actor.get("alive", timeout=timeout):
            return False
        get_json(f"{info.url}/health", timeout=timeout, retries=0)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, HttpError):
        return False
    return True
