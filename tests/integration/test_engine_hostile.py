"""Attacks on the engine's HTTP server: it refuses, and goes on answering everybody else."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.engine.server.app import INFO_ROUTES
from slime.engine.server.control import CONTROL_ROUTES
from tests.e2e.runs import wait_until_gone
from tests.engines import LONG_CONTEXT, EngineServer, engine_server
from tests.tiny import make_byte_tokenizer, make_tiny_checkpoint
from tests.waiting import wait_for

JSON = {"Content-Type": "application/json"}
TEMPLATE = (
    "{% if shout %}HEY {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("m") / "model", max_position_embeddings=LONG_CONTEXT
    )
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def locked(checkpoint: Path):
    """As a run starts it: with a key."""
    with engine_server(checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def standalone(checkpoint: Path):
    """Without a key: generation is open to everybody."""
    with engine_server(checkpoint, token=None) as server:
        yield server


def call(
    server: EngineServer,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, str]:
    """By a client that knows no key."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=60
    )
    data = json.dumps(body).encode() if isinstance(body, dict | list) else body
    connection.request(
        method, path, data, {**(JSON if data is not None else {}), **(headers or {})}
    )
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def log_of(server: EngineServer) -> str:
    assert server.log_path is not None
    return server.log_path.read_text()


def test_every_route_but_health_needs_the_key(locked: EngineServer):
    posts = ["/generate", "/v1/chat/completions", "/v1/completions"]
    routes = [("GET", path) for path in INFO_ROUTES] + [("POST", path) for path in posts]
    routes += [
        (method, path) for path, (methods, _) in CONTROL_ROUTES.items() for method in methods
    ]
    wrong = ("Bearer wrong", "Bearer ", locked.token, "Bearer \xff\xfe", "Bearer é")
    for method, path in [*routes, ("GET", "/nowhere")]:
        body = {} if method == "POST" else None
        assert call(locked, method, path, body)[0] == 401
        for header in wrong:
            assert call(locked, method, path, body, {"Authorization": header})[0] == 401
    for path in ("/health", "/health_generate", "/ready"):
        assert call(locked, "GET", path) == (200, "")
    assert "Traceback" not in log_of(locked)
    assert locked.token not in log_of(locked) and locked.token not in str(
        locked.get("/server_info")
    )


def test_an_engine_without_a_key_has_no_control_routes(standalone: EngineServer):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    assert call(standalone, "POST", "/generate", body)[0] == 200
    for path, (methods, _) in CONTROL_ROUTES.items():
        for header in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            status, text = call(standalone, methods[0], path, headers=header)
            assert status == 401 and "SLIME_ENGINE_TOKEN" in text


def test_the_key_can_be_an_option(checkpoint: Path):
    with engine_server(checkpoint, "--api-key", "from-the-option", token=None) as server:
        assert call(server, "GET", "/model_info")[0] == 401
        header = {"Authorization": "Bearer from-the-option"}
        status, text = call(server, "GET", "/server_info", headers=header)
        assert status == 200 and "from-the-option" not in text


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "tokenize",
        "tools",
        "documents",
        "eos_token",
        "messages",
        "return_dict",
        "x",
    ],
)
def test_clients_bring_no_template(standalone: EngineServer, name: str):
    bomb = "{% for i in range(4000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}x"
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "chat_template_kwargs": {name: bomb},
    }
    start = time.monotonic()
    status, text = call(standalone, "POST", "/v1/chat/completions", body)
    assert status == 400 and f"{name!r}" in text and "takes these: shout" in text
    assert time.monotonic() - start < 2


def test_variables_of_the_template_are_the_clients(standalone: EngineServer):
    def prompt_tokens(**kwargs: Any) -> int:
        message = {"role": "user", "content": "a"}
        body = {"messages": [message], "max_tokens": 1, "chat_template_kwargs": kwargs}
        status, text = call(standalone, "POST", "/v1/chat/completions", body)
        assert status == 200
        return json.loads(text)["usage"]["prompt_tokens"]

    assert prompt_tokens(shout=True) == prompt_tokens() + len("HEY ")


def test_health_and_updates_answer_during_an_attack(locked: EngineServer, checkpoint: Path):
    """Texts as long as are let through, long chats, huge counts, from clients who have the key."""
    text = "lorem ipsum " * 70_000  # 840,000 characters; 65,536 tokens of at most 15 are the limit
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    header = {"Authorization": f"Bearer {locked.token}"}
    attacks = [
        ("/generate", {"text": text}),
        ("/generate", {"text": [text] * 4}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": ""}] * 60_000}),
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/generate", {"input_ids": [[1, 2, 3]] * 30, "sampling_params": {"n": 16384}}),
        ("/generate", {"input_ids": [1] * 2_000_000}),
    ]
    waits: list[float] = []
    with ThreadPoolExecutor(len(attacks) * 2) as pool:
        running = [pool.submit(call, locked, "POST", *attack, header) for attack in attacks * 2]
        while not all(one.done() for one in running):
            start = time.monotonic()
            assert call(locked, "GET", "/health")[0] == 200
            waits.append(time.monotonic() - start)
            assert locked.post("/flush_cache", {"timeout": 30}) == "Cache flushed.\n"
    assert {one.result()[0] for one in running} <= {200, 400}
    assert len(waits) > 2 and max(waits) < 2.0, waits


def test_a_text_that_cannot_fit_is_not_tokenized(standalone: EngineServer):
    text = "a" * 4_000_000
    start = time.monotonic()
    for path, body in (
        ("/generate", {"text": text}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        status, reply = call(standalone, "POST", path, body)
        assert status == 400 and "characters) is longer than the model's context" in reply
    many = [{"role": "user", "content": ""}] * (LONG_CONTEXT + 1)
    status, reply = call(standalone, "POST", "/v1/chat/completions", {"messages": many})
    assert status == 400 and "messages are more than" in reply
    assert time.monotonic() - start < 10  # 7 s for each when they were tokenized


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [[1, 2, 3]] * 30, "sampling_params": {"n": 16384}},
        {"input_ids": [[1]] * 16385},
        {"text": ["a"] * 16385},
        {"input_ids": [1] * 60_000, "sampling_params": {"n": 16384, "max_new_tokens": 1}},
        {"input_ids": [1], "sampling_params": {"stop": ["a"] * 65}},
        {"input_ids": [1], "sampling_params": {"stop": "a" * 1025}},
    ],
)
def test_what_a_call_may_ask_for_is_bounded(standalone: EngineServer, body: dict[str, Any]):
    process = psutil.Process(standalone.pid)
    before = process.memory_info().rss
    start = time.monotonic()
    assert call(standalone, "POST", "/generate", body)[0] == 400
    assert time.monotonic() - start < 3
    assert process.memory_info().rss - before < 100 * 2**20


def test_prompts_times_n_of_completions_are_bounded(standalone: EngineServer):
    body = {"prompt": [[1, 2, 3]] * 30, "n": 16384}
    assert call(standalone, "POST", "/v1/completions", body)[0] == 400
    assert call(standalone, "POST", "/v1/completions", {"prompt": ["a"] * 16385})[0] == 400


def test_many_requests_are_aborted_at_once(standalone: EngineServer):
    """A client asks for as much as it may and goes away, again and again."""
    body = json.dumps({"input_ids": [1], "sampling_params": {"n": 16384, "max_new_tokens": 2000}})
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", int(standalone.url.rsplit(":", 1)[1]))
        connection.request("POST", "/generate", body, JSON)
        wait_for(
            lambda: (
                json.loads(call(standalone, "GET", "/server_info")[1])["internal_states"][0][
                    "num_running_reqs"
                ]
                > 0
            )
        )
        connection.close()
    start = time.monotonic()
    wait_for(
        lambda: (
            json.loads(call(standalone, "GET", "/server_info")[1])["internal_states"][0][
                "num_waiting_reqs"
            ]
            == 0
        ),
        timeout=60,
    )
    assert call(standalone, "GET", "/health")[0] == 200
    assert time.monotonic() - start < 15


def test_bodies_are_plain_json_of_bounded_size(standalone: EngineServer):
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}).encode()
    for headers, status in (
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
    ):
        assert call(standalone, "POST", "/generate", body, headers)[0] == status
    bomb = gzip.compress(b" " * 60_000_000 + body)
    start = time.monotonic()
    assert call(standalone, "POST", "/generate", bomb, {"Content-Encoding": "gzip"})[0] == 415
    assert time.monotonic() - start < 2
    big = {"Content-Length": str(65 * 2**20)}
    assert call(standalone, "POST", "/generate", b"{}", big)[0] == 413


def test_web_pages_and_rebound_names_are_not_answered(standalone: EngineServer):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    port = standalone.url.rsplit(":", 1)[1]
    for host, status in (
        ("evil.example", 403),
        (f"evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("169.254.169.254", 403),
        (f"localhost:{port}", 200),
        (f"[::1]:{port}", 200),
        ("127.0.0.1", 200),
    ):
        assert call(standalone, "POST", "/generate", body, {"Host": host})[0] == status, host
        assert call(standalone, "GET", "/health", headers={"Host": host})[0] == status, host
    for origin in ("http://evil.example", "null", f"http://localhost:{port}"):
        assert call(standalone, "POST", "/generate", body, {"Origin": origin})[0] == 403


def test_deep_and_odd_bodies_are_the_clients_fault(locked: EngineServer):
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    header = {"Authorization": f"Bearer {locked.token}"}
    message = {"role": "user", "content": "a"}
    chats = [
        {"messages": [{"role": "user", "content": deep}]},
        {"messages": [{**message, "tool_calls": deep}]},
        {"messages": [{**message, "tool_calls": [{"function": 5}]}]},
        {"messages": [{"role": "user<|eos|>", "content": "a"}]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": [message], "tools": deep},
        {"messages": [message], "chat_template_kwargs": deep},
        {"messages": [message], "chat_template_kwargs": {"shout": deep}, "max_tokens": "x"},
    ]
    for body in chats:
        assert call(locked, "POST", "/v1/chat/completions", body, header)[0] == 400, body
    for key in ("input_ids", "text", "sampling_params", "rid", "return_logprob"):
        body = {"input_ids": [1], key: deep}
        assert call(locked, "POST", "/generate", body, header)[0] == 400, key
    assert call(locked, "POST", "/generate", b"[" * 100_000, header)[0] == 400
    assert "Traceback" not in log_of(locked)


def test_wrong_weights_are_refused_not_errors(locked: EngineServer, tmp_path: Path):
    header = {"Authorization": f"Bearer {locked.token}"}
    indices = ['{"weight_map": {"a": 5}}', "[]", "{", '{"weight_map": []}', "[" * 100_000]
    for number, index in enumerate(indices):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(index)
        body = {"model_path": str(folder)}
        status, text = call(locked, "POST", "/update_weights_from_disk", body, header)
        assert status == 400 and json.loads(text)["success"] is False
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    status, text = call(
        locked, "POST", "/update_weights_from_disk", {"model_path": str(tmp_path)}, header
    )
    assert status == 400 and "cannot be read" in text
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    for shape in ("abc", ["a"], [1.5], [-1], 7, None, deep):
        entry = {"name": "a", "dtype": "float32", "shape": shape, "offset": 0}
        body = {"load_format": "slime_shm", "handle": {}, "metadata": [entry]}
        assert call(locked, "POST", "/update_weights_from_tensor", body, header)[0] == 400
        body = {"names": ["a"], "dtypes": ["float32"], "shapes": [shape]}
        assert call(locked, "POST", "/update_weights_from_distributed", body, header)[0] == 400
    assert "Traceback" not in log_of(locked)


def test_a_group_that_nobody_joins_does_not_keep_the_process(checkpoint: Path):
    with engine_server(checkpoint) as server, ThreadPoolExecutor(1) as pool:
        body = {
            "master_address": "127.0.0.1",
            "master_port": 9,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        header = {"Authorization": f"Bearer {server.token}"}
        waiting = pool.submit(call, server, "POST", "/init_weights_update_group", body, header)
        time.sleep(2)
        assert not waiting.done()
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        wait_until_gone(process, timeout=30)
        assert waiting.exception() is not None


def test_refusals_leave_short_lines(standalone: EngineServer):
    for _ in range(20):
        call(standalone, "POST", "/generate", b"{")
    assert not re.search("Traceback", log_of(standalone))
