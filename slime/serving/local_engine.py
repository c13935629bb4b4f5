"""Texts of a model in a Hugging Face folder, by an embedded engine that lives as long as the call."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.config.env import child_env
from slime.core.errors import UserError
from slime.utils.sync_http import HttpError, post_json

_CONCURRENCY = 64
_STOP_TIMEOUT_S = 30


def generate_texts(
    model: Path, prompts: Sequence[str | list[dict[str, Any]]], sampling: Mapping[str, Any]
) -> list[str]:
    """Return one response per prompt, which is a text or a list of messages; fields have OpenAI's names."""
    with _engine(model) as (url, token), ThreadPoolExecutor(_CONCURRENCY) as pool:

        def ask(prompt: str | list[dict[str, Any]]) -> str:
            text = isinstance(prompt, str)
            route = "completions" if text else "chat/completions"
            payload = {"model": "model", "prompt" if text else "messages": prompt, **sampling}
            reply = post_json(f"{url}/v1/{route}", payload, token=token, timeout=3600)
            choice = reply["choices"][0]
            return choice["text"] if text else choice["message"]["content"] or ""

        try:
            return list(pool.map(ask, prompts))
        except HttpError as error:
            raise UserError(f"the engine refused a request: {error}") from None


@contextmanager
def _engine(model: Path) -> Iterator[tuple[str, str]]:
    """Yield URL and key of an engine on a free port of this machine."""
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory() as folder:
        port_file, log = Path(folder) / "port", Path(folder) / "log"
        command = [sys.executable, "-m", "slime.engine.server", "--model-path", str(model)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file)],
                env=child_env(SLIME_ENGINE_TOKEN=token),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    lines = log.read_text(errors="replace").splitlines() or ["no output"]
                    raise UserError(f"the engine for {model} did not start: {lines[-1]}")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}", token
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
