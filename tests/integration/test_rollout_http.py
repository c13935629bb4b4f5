"""The HTTP client: retries with growing waits, deadlines, and coroutines that do not outlive a failure."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest
from aiohttp import web

from slime.rollout.hook_calls import in_thread
from slime.utils.http import HttpStatusError, gather, post, post_once, run


@pytest.fixture
def serve():
    """`serve(handler)` gives the address of a server on the background loop."""
    runners = []

    def start(handler):
        async def begin():
            app = web.Application()
            app.router.add_post("/", handler)
            runner = web.AppRunner(app, shutdown_timeout=0.01)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            return f"http://127.0.0.1:{runner.addresses[0][1]}/"

        return run(begin())

    yield start
    for runner in runners:
        run(runner.cleanup())


def test_temporary_failures_are_repeated_with_growing_waits(serve):
    times = []

    async def handler(request):
        times.append(time.monotonic())
        if len(times) < 4:
            return web.Response(status=(500, 503, 429)[len(times) - 1])
        return web.json_response({"got": await request.json()})

    assert run(post(serve(handler), {"a": 1})) == {"got": {"a": 1}}
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert len(waits) == 3
    assert all(wait >= 0.25 * 2**number for number, wait in enumerate(waits))


def test_refusals_are_not_repeated_and_carry_the_servers_words(serve):
    calls = []

    async def handler(request):
        calls.append(1)
        return web.json_response({"error": {"message": "unknown field"}}, status=400)

    with pytest.raises(HttpStatusError, match="answered 400: unknown field") as caught:
        run(post(serve(handler), {}))
    assert len(calls) == 1 and caught.value.status == 400


def test_the_deadline_holds_for_dead_and_for_silent_servers(serve):
    async def silent(request):
        await asyncio.sleep(120)
        return web.Response()

    for url in ("http://127.0.0.1:9/", serve(silent)):
        start = time.monotonic()
        with pytest.raises((OSError, asyncio.TimeoutError)):
            run(post(url, {}, deadline_s=1.0))
        assert time.monotonic() - start < 60.0


def test_empty_body_is_none_and_headers_are_sent(serve):
    async def handler(request):
        assert request.headers["Authorization"] == "Bearer t"
        return web.Response()

    assert run(post_once(serve(handler), {}, headers={"Authorization": "Bearer t"})) is None


def test_gather_ends_the_others_when_one_fails():
    cancelled = []

    async def wait(name):
        try:
            await asyncio.sleep(120)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def fail():
        await asyncio.sleep(0.01)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(gather([wait("a"), fail(), wait("b")]))
    assert cancelled == ["a", "b"]


def test_gather_keeps_the_order():
    async def value(number):
        await asyncio.sleep(0.01 * (3 - number))
        return number

    assert run(gather(value(n) for n in range(3))) == [0, 1, 2]


def test_blocking_calls_run_side_by_side():
    """Each of the four waits for the other three."""
    meeting = threading.Barrier(4)

    async def all_four():
        return await gather(in_thread(meeting.wait, 60) for _ in range(4))

    assert sorted(run(all_four())) == [0, 1, 2, 3]
