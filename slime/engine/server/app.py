"""HTTP routes of the engine.

With a key, every route requires it except /health, /health_generate and /ready, which reveal nothing.
Without a key, control routes are closed and all other routes are open, as in SGLang.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from aiohttp import web

import slime
from slime.engine.engine import Engine
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import LONGEST_CONSTRAINT, RequestError
from slime.engine.server.control import CONTROL_ROUTES
from slime.engine.server.image_data import read_image_data
from slime.engine.server.json_http import INLINE_BODY, json_reply, parse_json, send_events
from slime.engine.server.openai_routes import OpenAIRoutes
from slime.engine.server.protocol import Generation, Limits, encode_text, make_reply, parse_generate
from slime.engine.server.threads import ReplyHub, Workers
from slime.utils.http_guard import (
    MIB,
    BodyReader,
    HttpLimits,
    Refused,
    check_browser,
    check_media_type,
    has_key,
)
from slime.utils.machine import process_memory

_CONTROL_BODY = 1024 * MIB  # weight metadata; control routes require the key
_TEXT_S = 20.0
_REPLIES_AT_A_TIME = 256
_HEALTH_POLL = 0.5  # seconds
_OPEN_ROUTES = ("/health", "/health_generate", "/ready")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineApp:
    """Binds one engine to its routes; must be constructed on the event loop that serves them."""

    def __init__(
        self, engine: Engine, hub: ReplyHub, key: str | None, http: HttpLimits | None = None
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._key = key
        self._bodies = BodyReader(http or HttpLimits())
        self._workers = Workers()
        self._limits = Limits(
            context_len=engine.runner.context_len,
            cache_tokens=engine.sizes.num_pages * engine.args.page_size,
            vocab_size=engine.runner.vocab_size,
            routed_experts=engine.runner.routed_experts is not None,
            images=engine.runner.images,
        )

    def make(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_post("/generate", self._generate)
        OpenAIRoutes(self._engine, self._hub, self._limits, self._bodies, self._workers).add_to(app)
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
        try:
            check_browser(request, self._engine.args.host)
            self._check_key(request)
            check_media_type(request)
            return await handler(request)
        except RequestError as error:
            if error.plain:
                return json_reply({"error": str(error)}, 400)
            return _error(str(error), 400)
        except Refused as refusal:
            return _error(str(refusal), refusal.status)

    def _check_key(self, request: web.Request) -> None:
        if request.path in _OPEN_ROUTES:
            return
        if self._key is not None:
            if not has_key(request, self._key):
                raise Refused(
                    401, "this route needs the header `Authorization: Bearer <key of this engine>`"
                )
        elif request.path in CONTROL_ROUTES:
            raise Refused(
                401, "control routes are closed: start the engine with SLIME_ENGINE_TOKEN=<key>"
            )

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        generation = await self._parse(await self._bodies.read(http))
        if self._engine.failure is not None:
            return _error(f"the engine stopped: {self._engine.failure!r}", 503)
        self._hub.check_capacity(len(generation.requests))
        if generation.stream:
            return await send_events(http, self._events(generation))
        await self._hub.run(generation.requests)
        failed = _failed(generation.requests)
        if failed is not None:
            return failed
        replies: list[dict[str, Any]] = []
        for request in generation.requests:
            replies.append(make_reply(request, self._engine, generation.with_token_text))
            if len(replies) % _REPLIES_AT_A_TIME == 0:
                await asyncio.sleep(0)  # let other handlers run
        return json_reply(replies if generation.is_batch else replies[0])

    async def _parse(self, data: bytes) -> Generation:
        """Parse small bodies without text, images or constraints on the event loop, others on a thread."""
        if len(data) > INLINE_BODY:
            return await self._workers.run(lambda: self._parse_body(parse_json(data)))
        body = parse_json(data)
        threaded = isinstance(body, dict) and any(body.get(key) for key in ("text", "image_data"))
        if threaded or constrains(body):
            return await self._workers.run(lambda: self._parse_body(body))
        return self._parse_body(body)

    def _parse_body(self, body: Any) -> Generation:
        codec, limits, deadline = self._engine.codec, self._limits, time.monotonic() + _TEXT_S
        body = read_image_data(body, limits.images, deadline, limits.context_len)
        return parse_generate(encode_text(body, codec, limits, deadline), self._engine, limits)

    async def _events(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """Yield replies, each with everything generated so far."""
        places = {request: index for index, request in enumerate(generation.requests)}
        async for request in self._hub.stream(generation.requests):
            reply = _stream_error(request) or make_reply(
                request, self._engine, generation.with_token_text
            )
            if generation.is_batch:
                reply["index"] = places[request]
            yield reply

    async def _health(self, _: web.Request) -> web.Response:
        """Return 200 if the engine thread responds, or is busy with a call such as a weight update."""
        # This route needs no key: a flood of it must not make the engine wait for launched steps.
        answer = asyncio.wrap_future(self._engine.call(lambda: None, after_steps=False))
        while self._engine.failure is None:
            done, _pending = await asyncio.wait([answer], timeout=_HEALTH_POLL)
            if done or self._engine.in_call:
                return web.Response()
        return web.Response(status=503)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.failure is None else 503)

    def _info_handler(self, info: Callable[[Engine], dict[str, Any]]) -> Handler:
        async def handle(_: web.Request) -> web.Response:
            return json_reply(info(self._engine))

        return handle

    def _control_handler(self, route: Callable[..., Awaitable[Any]]) -> Handler:
        async def handle(http: web.Request) -> web.Response:
            body = parse_json(await self._bodies.read(http, _CONTROL_BODY) or b"{}")
            if not isinstance(body, dict):
                raise RequestError("the body must be a JSON object")
            reply = await route(self._engine, {**http.query, **body})
            if isinstance(reply, web.Response):
                return reply
            failed = isinstance(reply, dict) and reply.get("success") is False
            return json_reply(reply, 400 if failed else 200)

        return handle


def constrains(body: Any) -> bool:
    """Return whether a body has a schema or regular expression to compile."""
    given = body.get("sampling_params") if isinstance(body, dict) else None
    every = given if isinstance(given, list) else [given]
    return any(isinstance(one, dict) and LONGEST_CONSTRAINT.keys() & one for one in every)


def _failed(requests: list[Request]) -> web.Response | None:
    """Return the HTTP error of the first request aborted with a status code, if any."""
    for request in requests:
        if request.finish is not None and request.finish.status_code is not None:
            return _error(request.finish.message, request.finish.status_code)
    return None


def _stream_error(request: Request) -> dict[str, Any] | None:
    finish = request.finish
    if finish is None or finish.status_code is None:
        return None
    return {"error": {"message": finish.message, "type": "abort", "code": finish.status_code}}


def _error(message: str, status: int) -> web.Response:
    return json_reply({"error": {"message": message}}, status)


def model_info(engine: Engine) -> dict[str, Any]:
    config = engine.runner.model.config
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.args.served_model_name or engine.model_path,
        "tokenizer_path": engine.args.tokenizer_path or engine.args.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.weight_version,
        "load_format": engine.args.load_format,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": engine.runner.tower is not None,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": config.architectures,
    }


def server_info(engine: Engine) -> dict[str, Any]:
    scheduler, sizes = engine.scheduler, engine.sizes
    page_size = engine.args.page_size
    state = {
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": len(scheduler.waiting),
        "num_used_tokens": (sizes.num_pages - scheduler.pool.num_available) * page_size,
        "num_cached_pages": len(scheduler.cache),
        "num_retracted_reqs": scheduler.num_retracted,
        "num_steps": engine.num_steps,
        "paused": engine.pause_mode,
        "released": sorted(engine.released),
        "weight_version": engine.weight_version,
        "memory": process_memory(),
        "lora_adapters": {} if engine.lora is None else engine.lora.describe(),
    }
    options = dataclasses.asdict(engine.args)
    del options["api_key"]
    return {
        **options,
        "engine": "slime",
        "version": slime.__version__,
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "device": str(engine.runner.device),
        "context_length": engine.runner.context_len,
        "max_running_requests": sizes.max_running,
        "max_total_num_tokens": sizes.num_pages * page_size,
        "chunked_prefill_size": sizes.chunk_size,
        "internal_states": [state],
    }


def models(engine: Engine) -> dict[str, Any]:
    name = engine.args.served_model_name or engine.model_path
    entry = {
        "id": name,
        "object": "model",
        "owned_by": "slime",
        "root": engine.model_path,
        "max_model_len": engine.runner.context_len,
    }
    adapters = [] if engine.lora is None else engine.lora.adapters.values()
    entries = [
        {**entry, "id": adapter.name, "root": adapter.path, "parent": name} for adapter in adapters
    ]
    return {"object": "list", "data": [entry, *entries]}


INFO_ROUTES: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "/model_info": model_info,
    "/get_model_info": model_info,
    "/server_info": server_info,
    "/get_server_info": server_info,
    "/v1/models": models,
}
