import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.utils.sync_http import HttpError, get_json, post_json


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent; /text with plain text, /bad with 400, /slow too late."""

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self.answer(None)

    def answer(self, body: object) -> None:
        if self.path == "/slow":
            time.sleep(2)
        content = {"path": self.path, "body": body, "token": self.headers.get("Authorization")}
        data = b"plain words" if self.path == "/text" else json.dumps(content).encode()
        self.send_response(400 if self.path == "/bad" else 200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0):
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def url():
    with serving(Echo) as url:
        yield url


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_body_token_and_query_arrive(url):
    reply = post_json(f"{url}/a/b?c=d", {"x": [1, "ü"]}, token="t")
    assert reply == {"path": "/a/b?c=d", "body": {"x": [1, "ü"]}, "token": "Bearer t"}
    assert get_json(f"{url}/a") == {"path": "/a", "body": None, "token": None}


def test_a_reply_that_is_not_json_is_its_text(url):
    assert get_json(f"{url}/text") == "plain words"


def test_an_error_status_is_raised_with_url_and_text(url):
    with pytest.raises(HttpError, match=r"POST .*/bad: status 400: .*hello") as raised:
        post_json(f"{url}/bad", {"m": "hello"})
    assert raised.value.status == 400


def test_a_late_answer_is_an_error_at_the_deadline(url):
    started = time.monotonic()
    with pytest.raises(HttpError, match=r"/slow: no answer within 0.3 s"):
        get_json(f"{url}/slow", timeout=0.3)
    assert time.monotonic() - started < 1.5


def test_an_answer_that_drips_does_not_extend_the_deadline():
    class Drip(Echo):
        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(30):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.1)

    started = time.monotonic()
    with serving(Drip) as url, pytest.raises(HttpError, match="no answer"):
        get_json(url, timeout=0.5)
    assert time.monotonic() - started < 2.5


def test_a_server_that_comes_up_late_is_waited_for():
    port = free_port()
    answers = []
    caller = threading.Thread(
        target=lambda: answers.append(get_json(f"http://127.0.0.1:{port}/a", retries=5))
    )
    caller.start()
    time.sleep(0.3)
    with serving(Echo, port):
        caller.join(10)
    assert answers and answers[0]["path"] == "/a"


def test_a_server_that_never_comes_up_is_named():
    url = f"http://127.0.0.1:{free_port()}/a"
    with pytest.raises(HttpError, match=f"GET {url}: cannot connect") as raised:
        get_json(url, retries=1)
    assert raised.value.status is None


def test_a_request_that_was_sent_is_not_repeated():
    seen = []

    class HangUp(Echo):
        def answer(self, body: object) -> None:
            seen.append(self.path)
            self.connection.shutdown(socket.SHUT_RDWR)

    with serving(HangUp) as url, pytest.raises(HttpError, match="connection lost"):
        post_json(f"{url}/update", {}, retries=3)
    assert seen == ["/update"]
