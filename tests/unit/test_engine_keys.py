"""The run's key goes to the run's engines, whoever posts to them, and to nobody else."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.rollout.engine_pool import EnginePool
from slime.utils import http
from slime.utils.engine_keys import forget_keys, key_headers, remember_key
from slime.utils.sync_http import get_json, post_json


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def servers():
    """Two of them; `seen` has the Authorization header of every request."""
    made = [ThreadingHTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
    for server in made:
        server.seen = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_hooks_that_post_to_an_engine_send_its_key(servers):
    engine, stranger = servers
    pool = EnginePool([], token="secret")
    pool.set_urls([url(engine)])
    for server in servers:
        http.run(http.post(f"{url(server)}/generate", {}))
        post_json(f"{url(server)}/generate", {})
        get_json(f"{url(server)}/model_info")
    assert engine.seen == ["Bearer secret"] * 3
    assert stranger.seen == [None] * 3
    http.run(pool.generate({}))
    http.run(pool.abort_all())
    assert engine.seen == ["Bearer secret"] * 5


def test_a_router_gets_the_key_too_and_a_header_of_the_caller_wins(servers):
    engine, router = servers
    pool = EnginePool([], token="secret")
    pool.set_urls([url(engine)], url(router))
    http.run(pool.generate({}, session_id="s"))
    http.run(http.post_once(url(router), {}, headers={"Authorization": "Bearer own"}))
    assert router.seen == ["Bearer secret", "Bearer own"]


def test_keys_are_of_an_address():
    remember_key(["http://10.0.0.1:30000"], "secret")
    assert key_headers("http://10.0.0.1:30000/generate?a=b")
    for other in ("http://10.0.0.1:30001/generate", "https://10.0.0.1:30000/", "http://10.0.0.1/"):
        assert key_headers(other) == {}
    assert key_headers("http://10.0.0.1:30000@evil.example/generate") == {}
    forget_keys(["http://10.0.0.1:30000/"])
    assert key_headers("http://10.0.0.1:30000/generate") == {}
