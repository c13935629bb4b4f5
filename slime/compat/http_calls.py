"""`post` and `get` of `slime.utils.http_utils`."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from slime.rollout.context import RolloutContext
from slime.rollout.engine_pool import SESSION_HEADER, EnginePool
from slime.rollout.hook_calls import on_main_loop
from slime.utils import http
from slime.utils.sync_http import get_json

_SECONDS_PER_RETRY = 5.0  # on average, of the growing pauses between retries


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST JSON and return the parsed reply, with retries.

    A request to /generate of the run's router or first engine goes through the pool of engines, which
    spreads requests over all of them and repeats those of an engine that was lost. Requests with the same
    `X-SMG-Routing-Key` header go to the same engine, for its prefix cache.
    """
    pool = _pool_behind(url)
    if pool is not None:
        session_id = (headers or {}).get(SESSION_HEADER)
        return await on_main_loop(pool.generate(payload, session_id=session_id))
    deadline_s = max(max_retries, 1) * _SECONDS_PER_RETRY
    return await http.post(url, payload, deadline_s=deadline_s, headers=headers)


async def get(url: str) -> Any:
    """GET a URL and return the parsed reply."""
    return await asyncio.to_thread(get_json, url)


def _pool_behind(url: str) -> EnginePool | None:
    """Return the engines that serve /generate at this address, if it is one of the run's."""
    parts = urlsplit(url)
    try:
        context = RolloutContext.current()
    except RuntimeError:  # a script without a run
        return None
    for pool in (context.pool, *context.models.values()):
        addresses = {urlsplit(address).netloc for address in (*pool.urls, *pool.in_flight)}
        if parts.path == "/generate" and parts.netloc in addresses:
            return pool
    return None
