"""Asking servers that somebody else runs, the embedded engine's and the real SGLang's alike."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.serving.external import find_external
from tests.args import make_args
from tests.tiny import make_tiny_checkpoint


def external(model: Path, *addresses: str) -> Args:
    return make_args(
        rollout_engine=None,
        hf_checkpoint=str(model),
        rollout_external=True,
        rollout_external_engine_addrs=list(addresses),
    )


@contextmanager
def serve_replies(replies: dict[str, Any]) -> Iterator[str]:
    """Yield the URL of a server with a fixed JSON reply for each of these routes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps(replies[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def check_refusals(url: str, folder: Path) -> None:
    """A server of a tiny Qwen3 is refused for another model, and for another tokenizer."""
    other = make_tiny_checkpoint(folder / "llama", "llama")
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*start it with the model"):
        find_external(external(other, url))
    spelled = make_tiny_checkpoint(folder / "spelled")
    path = spelled / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["c"] = vocab["c"], vocab["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another tokenizer"):
        find_external(external(spelled, url))
