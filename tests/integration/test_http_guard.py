"""Clients that open connections and do not go on, against a server with limits of a fraction of a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from slime.utils.http_guard import BodyReader, GuardedServer, HttpLimits, Refused
from tests.waiting import wait_for

LIMITS = HttpLimits(
    head_s=0.5, idle_s=0.5, body_s=0.5, max_body=1000, max_bodies=1500, max_connections=20
)
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@contextlib.contextmanager
def served(limits: HttpLimits = LIMITS) -> Iterator[int]:
    """A server that answers with the length of the body; its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    bodies = BodyReader(limits)

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.Response(text=str(len(await bodies.read(request))))
        except Refused as refusal:
            return web.Response(text=str(refusal), status=refusal.status)

    async def start() -> GuardedServer:
        app = web.Application()
        app.router.add_post("/", answer)
        server = GuardedServer(app, limits)
        await server.start(listener)
        return server

    listener = socket.create_server(("127.0.0.1", 0))
    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield listener.getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(65536).split()[1])


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"POST / HT", REQUEST[:-2] % 5])
def test_a_head_that_does_not_come_ends_the_connection(sent):
    with served() as port:
        connections = [connect(port, sent) for _ in range(10)]
        wait_for(lambda: all(map(is_closed, connections)), timeout=20)


def test_a_body_that_does_not_come_ends_the_request():
    with served() as port:
        connection = connect(port, REQUEST % 100 + b"half")
        assert status(connection) == 408
        wait_for(lambda: is_closed(connection), timeout=20)


def test_an_idle_connection_is_closed_and_a_used_one_is_not():
    with served() as port:
        idle, used = (connect(port, REQUEST % 2 + b"ab") for _ in range(2))
        assert status(idle) == status(used) == 200
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            used.sendall(REQUEST % 2 + b"ab")
            assert status(used) == 200
            time.sleep(0.1)
        assert is_closed(idle)


def test_open_connections_keep_nobody_out():
    """Ten times as many as the server holds, all silent: an honest client is answered meanwhile."""
    patient = HttpLimits(head_s=60, idle_s=60, max_connections=20)
    with served(patient) as port:
        silent = [connect(port, b"POST / HT") for _ in range(200)]
        assert status(connect(port, REQUEST % 2 + b"ab")) == 200
        wait_for(lambda: sum(map(is_closed, silent)) >= 180, timeout=20)


def test_bodies_are_bounded_each_and_together():
    with served(HttpLimits(body_s=20, max_body=1000, max_bodies=1500)) as port:
        assert status(connect(port, REQUEST % 1001)) == 413
        chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert status(connect(port, chunked + b"%x\r\n" % 2000 + b"a" * 2000)) == 413
        half = connect(port, REQUEST % 900 + b"a")
        time.sleep(0.3)
        assert status(connect(port, REQUEST % 900 + b"a")) == 503
        half.sendall(b"a" * 899)
        assert status(half) == 200
        assert status(connect(port, REQUEST % 900 + b"a" * 900)) == 200


def test_malformed_requests_do_not_fill_the_log(caplog):
    caplog.set_level(logging.DEBUG)
    with served(HttpLimits()) as port:
        for _ in range(50):
            assert status(connect(port, b"GET / HTTP/9.9\r\nbad header\r\n\r\n")) == 400
    lines = [record for record in caplog.records if record.name == "slime.http_server"]
    assert len(lines) <= 5
    assert "Traceback" not in caplog.text
