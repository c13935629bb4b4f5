import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.utils.sync_http import HttpError, JsonClient, get_json, post_json


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent; /text with plain text, /bad with 400."""

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self.answer(None)

    def answer(self, body: object) -> None:
        content = {"path": self.path, "body": body, "token": self.headers.get("Authorization")}
        data = b"plain words" if self.path == "/text" else json.dumps(content).encode()
        self.send_response(400 if self.path == "/bad" else 200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]):
    with not_listening(handler) as server, listening(server):
        yield _url(server)


@contextmanager
def not_listening(handler: type[BaseHTTPRequestHandler] = Echo):
    """A server that is bound to its port and does not listen yet."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler, bind_and_activate=False)
    server.server_bind()
    yield server
    server.server_close()


@contextmanager
def listening(server: ThreadingHTTPServer):
    server.server_activate()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield
    server.shutdown()


def _url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def url():
    with serving(Echo) as url:
        yield url


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


def test_a_late_answer_is_an_error_at_the_deadline():
    given_up = threading.Event()

    class Slow(Echo):
        def answer(self, body: object) -> None:
            given_up.wait(60)

    with serving(Slow) as url:
        with pytest.raises(HttpError, match=r"/slow: no answer within 0.3 s"):
            get_json(f"{url}/slow", timeout=0.3)
        given_up.set()


def test_an_answer_that_drips_does_not_extend_the_deadline():
    given_up = threading.Event()

    class Drip(Echo):
        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(600):
                if given_up.wait(0.1):
                    return
                self.wfile.write(b" ")
                self.wfile.flush()

    with serving(Drip) as url:
        with pytest.raises(HttpError, match="no answer"):
            get_json(url, timeout=0.5)
        given_up.set()


def test_a_server_that_comes_up_late_is_waited_for():
    answers = []
    with not_listening() as server:
        url = f"{_url(server)}/a"
        caller = threading.Thread(target=lambda: answers.append(get_json(url, retries=7)))
        caller.start()
        time.sleep(0.3)
        with listening(server):
            caller.join(60)
    assert answers and answers[0]["path"] == "/a"


def test_a_server_that_never_comes_up_is_named():
    with not_listening() as server:
        url = f"{_url(server)}/a"
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


class Counting(Echo):
    """Keeps connections open, and numbers them by the answers' `client`."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: object) -> None:
        data = json.dumps({"client": self.client_address[1], "body": body}).encode()
        self.send_response(400 if self.path == "/bad" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_calls_one_after_the_other_share_a_connection():
    with serving(Counting) as url:
        server = JsonClient(url, token="t")
        replies = []
        for number in range(40):
            replies.append(server.start("POST", "/a", {"n": number}).result())
            with pytest.raises(HttpError, match="status 400"):
                server.start("POST", "/bad", {}).result()
        replies.append(server.start("GET", "/a").result())
        server.close()
        after = server.start("GET", "/a").result()
        server.close()
    assert [reply["body"] for reply in replies] == [*({"n": n} for n in range(40)), None]
    ports = [reply["client"] for reply in replies]
    # One that was idle for a second, as where the machine stood still, is not used again.
    assert len(set(ports)) < 10 and after["client"] != ports[-1]


def test_calls_at_the_same_time_have_a_connection_each():
    with serving(Counting) as url:
        server = JsonClient(url)
        calls = [server.start("POST", "/a", {"n": n}) for n in range(2)]
        replies = [call.result() for call in reversed(calls)]
        server.close()
    assert [reply["body"]["n"] for reply in replies] == [1, 0]
    assert replies[0]["client"] != replies[1]["client"]


def test_a_connection_that_the_server_closed_is_replaced():
    closed = threading.Event()

    class Once(Counting):
        def answer(self, body: object) -> None:
            super().answer(body)
            self.close_connection = True  # without having said so

        def finish(self) -> None:
            super().finish()
            self.connection.shutdown(socket.SHUT_RDWR)
            closed.set()

    with serving(Once) as url:
        server = JsonClient(url)
        for number in range(3):
            assert server.start("POST", "/a", {"n": number}).result()["body"] == {"n": number}
            assert closed.wait(60)
            closed.clear()


def test_a_kept_connection_that_breaks_amid_a_call_is_not_repeated():
    seen = []

    class Break(Counting):
        def answer(self, body: object) -> None:
            seen.append(self.path)
            if self.path == "/update":
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                super().answer(body)

    with serving(Break) as url:
        server = JsonClient(url)
        server.start("GET", "/a").result()
        with pytest.raises(HttpError, match="connection lost"):
            server.start("POST", "/update", {}).result()
        server.start("GET", "/b").result()
    assert seen == ["/a", "/update", "/b"]


@contextmanager
def late():
    """A server that answers once its event is set; and the event after its answer."""
    wanted, given = threading.Event(), threading.Event()

    class Late(Echo):
        def answer(self, body: object) -> None:
            wanted.wait(60)
            super().answer(body)
            given.set()

    with serving(Late) as url:
        yield url, wanted, given
        wanted.set()


def test_a_long_wait_probes():
    probes = []
    with late() as (url, wanted, _):

        def probe() -> None:
            probes.append(1)
            if len(probes) == 3:
                wanted.set()

        assert JsonClient(url).start("GET", "/a").result(0.1, probe)["path"] == "/a"
    assert len(probes) >= 3


def test_a_failed_probe_ends_the_wait():
    def give_up() -> None:
        raise HttpError("it is gone")

    with late() as (url, _, _), pytest.raises(HttpError, match="it is gone"):
        JsonClient(url).start("GET", "/b").result(0.1, give_up)


def test_a_reply_that_arrives_during_a_probe_counts():
    with late() as (url, wanted, given):

        def probe() -> None:
            wanted.set()
            assert given.wait(60)
            raise HttpError("no answer to this")

        assert JsonClient(url).start("GET", "/a").result(0.1, probe)["path"] == "/a"
