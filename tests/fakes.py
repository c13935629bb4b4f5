"""A stand-in for an inference engine's control routes, for failures a real one does not have.

engine = FakeEngine({"w": torch.zeros(4)}, token="t")
engine.refuse["/update_weights_from_tensor"] = "w"   such a call that says "w" is answered 400
engine.before_copy = lambda engine, data: ...        sees the bytes of an update first
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.core.types import EngineInfo
from slime.weights.checksum import format_checksum, tensor_checksum
from slime.weights.ipc import import_buffer


class FakeEngine:
    def __init__(self, weights: dict[str, torch.Tensor], *, token: str, sessions: bool = True):
        self.weights, self.token, self.sessions = weights, token, sessions
        self.calls: list[str] = []
        self.paused = self.session_open = False
        self.version = "default"
        # By route: what a call says that is refused. Calls cannot be counted: two may come at once.
        self.refuse: dict[str, str] = {}
        self.before_copy: Callable[[FakeEngine, torch.Tensor], None] = lambda engine, data: None
        self._groups: dict[str, dist.ProcessGroupGloo] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(url=self.url)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, route: str, body: dict) -> tuple[int, object]:
        self.calls.append(route)
        if route in self.refuse and self.refuse[route] in json.dumps(body):
            return 400, {"success": False, "message": f"{route} was told to fail"}
        handler = getattr(self, route.strip("/").replace("/", "_"), None)
        if handler is None or (not self.sessions and route.endswith("_weight_update")):
            return 404, {"error": "no such route"}
        return handler(body)

    def model_info(self, body):
        return 200, {"weight_version": self.version}

    def pause_generation(self, body):
        self.paused = True
        return 200, {"status": "ok"}

    def continue_generation(self, body):
        self.paused = False
        return 200, {"status": "ok"}

    def begin_weight_update(self, body):
        if self.session_open:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.session_open = True
        return 200, {"success": True, "message": ""}

    def end_weight_update(self, body):
        self.session_open = False
        return 200, {"success": True, "message": ""}

    def flush_cache(self, body):
        return 200, "Cache flushed.\n"

    def update_weights_from_tensor(self, body):
        with import_buffer(body["handle"]) as data:
            self._copy(body["metadata"], data)
        return self._updated(body)

    def update_weights_from_distributed(self, body):
        offset, metadata = 0, []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            metadata.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset})
            offset += torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        data = torch.empty(offset, dtype=torch.uint8)
        self._groups[body["group_name"]].broadcast(data, 0).wait()
        self._copy(metadata, data)
        return self._updated(body)

    def update_weights_from_disk(self, body):
        index = json.loads(Path(body["model_path"], "model.safetensors.index.json").read_text())
        for file in sorted(set(index["weight_map"].values())):
            for name, tensor in load_file(Path(body["model_path"], file)).items():
                self.weights[name].copy_(tensor)
        return self._updated(body)

    def init_weights_update_group(self, body):
        """Built by hand: torch registers group names per process, and several engines live in this one."""
        name = body["group_name"]
        store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"])
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._groups[name] = dist.ProcessGroupGloo(
            store, body["rank_offset"], body["world_size"], timedelta(seconds=30)
        )
        return 200, {"success": True, "message": ""}

    def weights_checker(self, body):
        sums = {
            name: format_checksum(tensor_checksum(name, tensor))
            for name, tensor in self.weights.items()
        }
        return 200, {"success": True, "message": "", "ranks": [{"checksums": sums}]}

    def _copy(self, metadata: list[dict], data: torch.Tensor) -> None:
        self.before_copy(self, data)
        for entry in metadata:
            tensor = self.weights[entry["name"]]
            flat = data[entry["offset"] :][: tensor.nbytes].view(getattr(torch, entry["dtype"]))
            tensor.copy_(flat.view(entry["shape"]))

    def _updated(self, body: dict):
        self.version = body["weight_version"]
        return 200, {"success": True, "message": ""}


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers.get("Authorization") != f"Bearer {engine.token}":
                self.reply(401, {"error": "no token"})
            else:
                self.reply(*engine.answer(self.path, body))

        def do_GET(self) -> None:
            self.reply(*engine.answer(self.path, {}))

        def reply(self, status: int, content: object) -> None:
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
