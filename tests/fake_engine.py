"""A stand-in for an inference engine at the HTTP seam: /generate and /abort_request with a script.

    with FakeEngine(lambda request: Reply(text="2", latency_s=0.1)) as engine:
        pool = EnginePool([engine.url])

An aborted request answers at once with as much of its reply as its latency has allowed so far. What a
test says about requests that are under way at the same time it had better arrange by `until`: seconds
prove nothing on a machine that stalls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.tiny import EOS_ID, make_byte_tokenizer

# A reply whose condition never comes true is sent all the same, for the test to fail.
_HELD_S = 60.0


@dataclass(kw_only=True)
class Reply:
    text: str = "ok"
    tokens: list[int] | None = None  # default: the bytes of the text, and end-of-text after a stop
    latency_s: float = 0.0
    until: Callable[[], bool] | None = None  # held back until this is true
    aborted_after: int | None = None  # tokens that an abort leaves; default: by the latency
    finish: str = "stop"  # stop, length, abort
    matched: str | None = None  # the stop string that ended it; default: the last token
    versions: list[dict[str, Any]] | None = None
    status: int = 200
    drop: bool = False  # close the connection without an answer


@dataclass(kw_only=True)
class Request:
    """What one /generate call asked for, as a script sees it."""

    number: int  # counts from 0 over the engine's life
    input_ids: list[int]
    sampling_params: dict[str, Any]
    prompt: str


@dataclass(kw_only=True)
class _Live:
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)


class FakeEngine:
    def __init__(
        self, script: Callable[[Request], Reply] = lambda request: Reply(), *, port: int = 0
    ) -> None:
        self.script = script
        self.port = port
        self.requests: list[Request] = []
        self.max_in_flight = 0
        self.num_aborts = 0
        self.weight_version = "default"
        self._live: set[int] = set()
        self._aborts: dict[int, _Live] = {}
        self._tokenizer = make_byte_tokenizer()
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def in_flight(self) -> int:
        return len(self._aborts)

    def __enter__(self) -> FakeEngine:
        if not self._thread.is_alive():
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stop(self) -> None:
        """Close the port and drop every connection; one accepted at this very moment may stay open."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            asyncio.run_coroutine_threadsafe(runner.cleanup(), self._loop).result()

    def restart(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _generate(self, http_request: web.Request) -> web.StreamResponse:
        body = await http_request.json()
        request = Request(
            number=len(self.requests),
            input_ids=body["input_ids"],
            sampling_params=body["sampling_params"],
            prompt=str(self._tokenizer.decode(body["input_ids"])),
        )
        self.requests.append(request)
        live = self._aborts[request.number] = _Live()
        self.max_in_flight = max(self.max_in_flight, len(self._aborts))
        try:
            reply = self.script(request)
            return await self._answer(http_request, request, reply, live)
        finally:
            del self._aborts[request.number]

    async def _answer(
        self, http_request: web.Request, request: Request, reply: Reply, live: _Live
    ) -> web.StreamResponse:
        aborted = await self._hold(reply, live) or reply.finish == "abort"
        if reply.drop:
            assert http_request.transport is not None
            http_request.transport.close()
            return web.Response()
        if reply.status != 200:
            return web.json_response({"error": {"message": reply.text}}, status=reply.status)
        return web.json_response(self._body(request, reply, live, aborted))

    async def _hold(self, reply: Reply, live: _Live) -> bool:
        """Wait for as long as the script says; whether an abort came first."""
        deadline = time.monotonic() + _HELD_S
        while reply.until is not None and not (reply.until() or live.aborted.is_set()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.002)
        if reply.latency_s:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(live.aborted.wait(), reply.latency_s)
        return live.aborted.is_set()

    def _body(self, request: Request, reply: Reply, live: _Live, aborted: bool) -> dict[str, Any]:
        tokens, finish = self._tokens(reply), {"type": reply.finish}
        limit = request.sampling_params["max_new_tokens"]
        if len(tokens) > limit:
            tokens, finish = tokens[:limit], {"type": "length", "length": limit}
        elif reply.finish == "stop":
            finish["matched"] = reply.matched or tokens[-1]
        if aborted:
            tokens, finish = tokens[: _tokens_so_far(reply, live, len(tokens))], {"type": "abort"}
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        spans = reply.versions or [{"version": self.weight_version, "start": 0, "end": len(tokens)}]
        return {
            "text": text,
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": finish,
                "weight_version": self.weight_version,
                "weight_versions": spans,
                "output_token_logprobs": [[-0.5 - i / 100, t, None] for i, t in enumerate(tokens)],
            },
        }

    def _tokens(self, reply: Reply) -> list[int]:
        if reply.tokens is not None:
            return list(reply.tokens)
        tokens = self._tokenizer.encode(reply.text, add_special_tokens=False)
        return [*tokens, EOS_ID] if reply.finish == "stop" else tokens

    async def _abort(self, http_request: web.Request) -> web.Response:
        self.num_aborts += 1
        if (await http_request.json()).get("abort_all"):
            for live in self._aborts.values():
                live.aborted.set()
        return web.Response()


def _tokens_so_far(reply: Reply, live: _Live, count: int) -> int:
    if reply.aborted_after is not None:
        return reply.aborted_after
    if not reply.latency_s:
        return count
    return int(count * min((time.monotonic() - live.started) / reply.latency_s, 1.0))
