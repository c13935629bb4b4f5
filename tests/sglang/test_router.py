"""sglang-router in front of engines. The embedded engine stands behind it: it is up in a second."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from slime.config.arguments import parse_args
from slime.config.engine_groups import engines_of
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.rollout.engine_pool import EnginePool
from slime.serving.router import ExternalRouter, Router, RouterClient, make_router
from slime.utils import http
from slime.utils.addresses import find_port
from slime.utils.sync_http import get_json
from tests.args import make_args, make_argv
from tests.engines import TOKEN, EngineServer, engine_server

PARAMS = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def engines(model):
    with engine_server(model) as first, engine_server(model) as second:
        yield first, second


@pytest.fixture(params=["cache_aware", "manual"])
def router(request, engines, tmp_path):
    (tmp_path / "logs").mkdir()
    args = make_args(
        rollout_engine="sglang",
        rollout_num_gpus=2,
        run_dir=str(tmp_path),
        router_policy=request.param,
    )
    router = make_router(args, engines_of(args), "127.0.0.1", TOKEN)
    assert isinstance(router, Router)
    router.start()
    router.set_workers(infos(engines))
    yield router
    router.stop()
    assert not router.alive()


def infos(engines) -> list[EngineInfo]:
    return [EngineInfo(url=engine.url) for engine in engines]


def steps(engine: EngineServer) -> int:
    return engine.get("/server_info")["internal_states"][0]["num_steps"]


def flush(engines) -> None:
    for engine in engines:
        engine.post("/flush_cache")


def test_a_session_stays_on_one_engine_and_all_engines_are_used(router, engines):
    """Eight sessions of four turns each; every turn continues the one before."""
    flush(engines)
    pool = EnginePool([], token=TOKEN)
    pool.set_urls([engine.url for engine in engines], router.url)

    async def session(number: int) -> list[int]:
        prompt, cached = [number] * 40, []
        for _ in range(4):
            payload = {"input_ids": prompt, "sampling_params": PARAMS}
            reply = await pool.generate(payload, session_id=f"s{number}")
            cached.append(reply["meta_info"]["cached_tokens"])
            prompt = prompt + reply["output_ids"] + [number] * 20
        return cached

    async def all_sessions() -> list[list[int]]:
        return list(await asyncio.gather(*(session(number) for number in range(8))))

    before = [steps(engine) for engine in engines]
    for cached in http.run(all_sessions()):
        assert cached[0] == 0 and all(value >= 32 for value in cached[1:]), cached
    used = [steps(engine) - old for engine, old in zip(engines, before, strict=True)]
    assert sum(used) > 0
    assert all(used), used


def test_an_engine_that_is_taken_out_gets_nothing(router, engines):
    router.set_workers(infos(engines[1:]))
    pool = EnginePool([], token=TOKEN)
    pool.set_urls([engines[1].url], router.url)
    before = steps(engines[0])
    for number in range(6):
        payload = {"input_ids": [number, 7], "sampling_params": PARAMS}
        http.run(pool.generate(payload, session_id=f"t{number}"))
    assert steps(engines[0]) == before
    router.set_workers(infos(engines))
    http.run(pool.abort_all())  # reaches the engine itself, with the key


def test_the_router_wants_the_key_and_hides_it(router):
    for method, route in (("POST", "/generate"), ("GET", "/workers"), ("POST", "/workers")):
        body = b'{"input_ids": [1], "url": "http://127.0.0.1:1"}' if method == "POST" else None
        call = urllib.request.Request(
            router.url + route, body, {"Content-Type": "application/json"}, method=method
        )
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(call)
    assert TOKEN not in Path(f"/proc/{router.pid}/cmdline").read_text()
    assert TOKEN not in router.log_path.read_text()


def test_one_engine_needs_no_router(tmp_path: Path):
    args = make_args(rollout_engine="sglang", run_dir=str(tmp_path))
    assert make_router(args, engines_of(args), "127.0.0.1", TOKEN) is None


def test_a_router_of_somebody_else_gets_the_engines_of_this_run_and_loses_them_at_its_end(
    router, engines, tmp_path
):
    """Both runs have the router's key; workers that the other run added stay."""
    ours, others = infos(engines[:1]), infos(engines[1:])
    router.set_workers(others)
    host, port = router.url.removeprefix("http://").split(":")
    args = make_args(
        rollout_engine="sglang",
        run_dir=str(tmp_path),
        sglang_router_ip=host,
        sglang_router_port=int(port),
    )
    external = make_router(args, engines_of(args), "127.0.0.1", TOKEN)
    assert isinstance(external, ExternalRouter)
    external.start()
    external.set_workers(ours)
    assert workers(router) == {engine.url for engine in engines}
    pool = EnginePool([], token=TOKEN)
    pool.set_urls([ours[0].url], external.url)
    reply = http.run(pool.generate({"input_ids": [1, 2], "sampling_params": PARAMS}))
    assert len(reply["output_ids"]) == 2
    external.stop()
    assert workers(router) == {others[0].url} and router.alive()


class Half(ThreadingHTTPServer):
    """Stands in for a prefill or decode server; `requests` are the bodies of /generate."""

    def __init__(self, answer: int) -> None:
        super().__init__(("127.0.0.1", 0), HalfHandler)
        self.answer, self.requests = answer, []
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HalfHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Half

    def do_GET(self) -> None:
        self.reply({"model_path": "m", "served_model_name": "m"})

    def do_POST(self) -> None:
        self.server.requests.append(
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        )
        self.reply({"output_ids": [self.server.answer], "meta_info": {}})

    def reply(self, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


def test_a_split_router_sends_a_request_to_both_halves_and_returns_the_reply_of_decode(tmp_path):
    """Decode learns from the router at which address of the prefill engine the KV cache is."""
    (tmp_path / "logs").mkdir()
    words = make_argv(
        rollout_engine="sglang", prefill_num_servers=1, rollout_num_gpus=2, run_dir=str(tmp_path)
    )
    args = parse_args(words, offline=True)  # the transfer package is missing here
    router = make_router(args, engines_of(args), "127.0.0.1", TOKEN)
    assert router is not None
    router.start()
    prefill, decode = Half(answer=1), Half(answer=2)
    try:
        router.set_workers(
            [
                EngineInfo(url=prefill.url, role="prefill", bootstrap_port=8998),
                EngineInfo(url=decode.url, role="decode"),
            ]
        )
        pool = EnginePool([], token=TOKEN)
        pool.set_urls([prefill.url, decode.url], router.url)
        reply = http.run(pool.generate({"input_ids": [5, 6], "sampling_params": PARAMS}))
        assert reply["output_ids"] == [2]
        [first], [second] = prefill.requests, decode.requests
        assert first["bootstrap_room"] == second["bootstrap_room"]
        assert {r["bootstrap_port"] for r in (first, second)} == {8998}
        assert {r["bootstrap_host"] for r in (first, second)} == {"127.0.0.1"}
    finally:
        router.stop()
        prefill.shutdown()
        decode.shutdown()


def test_a_router_with_a_port_of_the_users_listens_there(engines, tmp_path):
    (tmp_path / "logs").mkdir()
    port = find_port("127.0.0.1")
    args = make_args(
        rollout_engine="sglang", rollout_num_gpus=2, run_dir=str(tmp_path), sglang_router_port=port
    )
    router = make_router(args, engines_of(args), "127.0.0.1", TOKEN)
    assert router is not None
    router.start()
    try:
        assert router.url == f"http://127.0.0.1:{port}" and workers(router) == set()
    finally:
        router.stop()


def test_an_external_router_that_does_not_answer_is_named(tmp_path):
    args = make_args(
        rollout_engine="sglang",
        run_dir=str(tmp_path),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=find_port("127.0.0.1"),
    )
    router = make_router(args, engines_of(args), "127.0.0.1", TOKEN)
    assert isinstance(router, ExternalRouter)
    with pytest.raises(UserError, match="no sglang-router answers at"):
        router.start(timeout_s=0.5)


def workers(router: RouterClient) -> set[str]:
    reply = get_json(f"{router.url}/workers", timeout=10)
    return {worker["url"] for worker in reply["workers"]}
