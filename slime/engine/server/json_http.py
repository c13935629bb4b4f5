"""JSON bodies and replies of all routes, and streams of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from aiohttp import web

from slime.engine.scheduler.sampling_params import RequestError
from slime.utils.http_guard import MIB

INLINE_BODY = MIB  # bodies up to this size are parsed on the event loop, larger ones on a thread


def parse_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def json_reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def send_events(
    http: web.Request, events: AsyncGenerator[dict[str, Any], None]
) -> web.StreamResponse:
    """Send server-sent events, then `[DONE]`; `events` is closed if the client disconnects."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    async with aclosing(events):
        async for event in events:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response
