"""HTTP routes of the engine. /generate and the read-only routes are open, all others need the token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from slime.engine.control import CONTROL_ROUTES
from slime.engine.engine import Engine
from slime.engine.hub import ReplyHub
from slime.engine.info import INFO_ROUTES
from slime.engine.openai_routes import OpenAIRoutes
from slime.engine.protocol import Generation, Limits, make_reply, parse_generate
from slime.engine.request import Request
from slime.engine.sampling_params import RequestError

_MAX_BODY = 1 << 30
_HEALTH_POLL = 0.5  # seconds
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineApp:
    """Binds one engine to its routes; must be made on the event loop that serves them."""

    def __init__(self, engine: Engine, hub: ReplyHub, token: str) -> None:
        self._engine = engine
        self._hub = hub
        self._token = token
        self._limits = Limits(
            context_len=engine.runner.context_len,
            cache_tokens=engine.sizes.num_pages * engine.args.page_size,
            vocab_size=engine.runner.vocab_size,
            routed_experts=engine.runner.routed_experts is not None,
        )

    def make(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/generate", self._generate)
        OpenAIRoutes(self._engine, self._hub, self._limits).add_to(app)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        app.router.add_get("/ready", self._ready)
        for path, info in INFO_ROUTES.items():
            app.router.add_get(path, self._info_handler(info))
        for path, (methods, route) in CONTROL_ROUTES.items():
            for method in methods:
                app.router.add_route(method, path, self._control_handler(route))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in CONTROL_ROUTES and not self._allowed(request):
            return _error(
                "this route needs the header `Authorization: Bearer <SLIME_ENGINE_TOKEN>`", 401
            )
        try:
            return await handler(request)
        except RequestError as error:
            if error.plain:
                return _json({"error": str(error)}, 400)
            return _error(str(error), 400)

    def _allowed(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        generation = parse_generate(
            _parse_json(await http.read()),
            codec=self._engine.codec,
            limits=self._limits,
            eos_ids=self._engine.eos_ids,
            new_seed=self._engine.new_seed,
        )
        if self._engine.failure is not None:
            return _error(f"the engine stopped: {self._engine.failure!r}", 503)
        if generation.stream:
            return await self._stream(http, generation)
        await self._hub.run(generation.requests)
        failed = _failed(generation.requests)
        if failed is not None:
            return failed
        replies = [self._reply(request, generation) for request in generation.requests]
        return _json(replies if generation.is_batch else replies[0])

    async def _stream(self, http: web.Request, generation: Generation) -> web.StreamResponse:
        """Server-sent events; each carries everything generated so far."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        async for request in self._hub.stream(generation.requests):
            reply = _stream_error(request) or self._reply(request, generation)
            if generation.is_batch:
                reply["index"] = generation.requests.index(request)
            await response.write(b"data: " + orjson.dumps(reply) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, request: Request, generation: Generation) -> dict[str, Any]:
        return make_reply(
            request,
            codec=self._engine.codec,
            weight_version=self._engine.weight_version,
            with_token_text=generation.with_token_text,
        )

    async def _health(self, _: web.Request) -> web.Response:
        """200 if the loop thread answers, or is busy with a call such as a weight update."""
        answer = asyncio.wrap_future(self._engine.call(lambda: None))
        while self._engine.failure is None:
            done, _pending = await asyncio.wait([answer], timeout=_HEALTH_POLL)
            if done or self._engine.in_call:
                return web.Response()
        return web.Response(status=503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.failure is None else 503)

    def _info_handler(self, info: Callable[[Engine], dict[str, Any]]) -> Handler:
        async def handle(_: web.Request) -> web.Response:
            return _json(info(self._engine))

        return handle

    def _control_handler(self, route: Callable[..., Awaitable[Any]]) -> Handler:
        async def handle(http: web.Request) -> web.Response:
            body = _parse_json(await http.read() or b"{}")
            if not isinstance(body, dict):
                raise RequestError("the body must be a JSON object")
            reply = await route(self._engine, {**http.query, **body})
            if isinstance(reply, web.Response):
                return reply
            failed = isinstance(reply, dict) and reply.get("success") is False
            return _json(reply, 400 if failed else 200)

        return handle


def _failed(requests: list[Request]) -> web.Response | None:
    """An abort that carries a status becomes an HTTP error."""
    for request in requests:
        if request.finish is not None and request.finish.status_code is not None:
            return _error(request.finish.message, request.finish.status_code)
    return None


def _stream_error(request: Request) -> dict[str, Any] | None:
    finish = request.finish
    if finish is None or finish.status_code is None:
        return None
    return {"error": {"message": finish.message, "type": "abort", "code": finish.status_code}}


def _parse_json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(message: str, status: int) -> web.Response:
    return _json({"error": {"message": message}}, status)
