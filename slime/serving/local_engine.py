"""Generates texts with a model in a Hugging Face folder, by an embedded engine started for the call."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.core.errors import UserError
from slime.serving.servers import START_TIMEOUT_S, ServerProcess, StartError, wait_for_port
from slime.utils.sync_http import HttpError, post_json

_CONCURRENCY = 64
_STOP_TIMEOUT_S = 30


def generate_texts(
    model: Path, prompts: Sequence[str | list[dict[str, Any]]], sampling: Mapping[str, Any]
) -> list[str]:
    """Return one response per prompt (a text or a list of messages); `sampling` has OpenAI's fields."""
    with _engine(model) as (url, token), ThreadPoolExecutor(_CONCURRENCY) as pool:

        def generate(prompt: str | list[dict[str, Any]]) -> str:
            text = isinstance(prompt, str)
            route = "completions" if text else "chat/completions"
            payload = {"model": "model", "prompt" if text else "messages": prompt, **sampling}
            reply = post_json(f"{url}/v1/{route}", payload, token=token, timeout=3600)
            choice = reply["choices"][0]
            return choice["text"] if text else choice["message"]["content"] or ""

        try:
            return list(pool.map(generate, prompts))
        except HttpError as error:
            raise UserError(f"the engine refused a request: {error}") from None


@contextmanager
def _engine(model: Path, *, start_timeout_s: float = START_TIMEOUT_S) -> Iterator[tuple[str, str]]:
    """Yield URL and key of an engine on a free port of this machine."""
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "slime.engine.server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)]
        process = ServerProcess(command, Path(folder) / "log", {"SLIME_ENGINE_TOKEN": token})
        try:
            try:
                port = wait_for_port(process, port_file, start_timeout_s)
            except StartError as error:
                last_line = process.last_lines(1) or "no output"
                raise UserError(f"the engine for {model} {error}: {last_line}") from None
            yield f"http://127.0.0.1:{port}", token
        finally:
            process.stop(_STOP_TIMEOUT_S)
