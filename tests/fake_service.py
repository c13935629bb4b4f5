"""A reward service for tests: answers POSTs with the given statuses in turn, then with the last one."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SILENCE = 0  # in place of a status: no answer at all


class FakeService:
    def __init__(self, statuses: list[int], reply: Any) -> None:
        self.bodies: list[Any] = []
        self.ended = threading.Event()
        lock = threading.Lock()  # each request is a thread of its own
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                with lock:
                    service.bodies.append(body)
                    status = statuses[min(len(service.bodies), len(statuses)) - 1]
                if status == SILENCE:
                    service.ended.wait(60)
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"

    def __enter__(self) -> FakeService:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
