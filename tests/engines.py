"""Engines for tests: one in this process without HTTP, and one as a server process."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.engine.arguments import EngineArgs
from slime.engine.engine import Engine
from slime.engine.scheduler.prompt_images import PromptImages, place_images
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import parse_sampling_params
from slime.utils.engine_keys import forget_keys, remember_key
from slime.utils.sync_http import get_json, post_json
from tests.forked import start_python
from tests.waiting import wait_for

TOKEN = "token-of-the-tests"
# Positions of a model whose requests take a minute and more, and a server with room for some of them.
LONG_CONTEXT = 1 << 16
ROOM = ("--max-total-tokens", str(4 * LONG_CONTEXT))


class LocalEngine:
    """An engine stepping in its own thread of this process; `generate` waits for all prompts."""

    def __init__(self, model_path: str | Path, **options: Any) -> None:
        self._done = threading.Condition()
        self._ended: set[Request] = set()  # as the engine has told, which is done with them then
        self.engine = Engine.launch(
            EngineArgs(model_path=str(model_path), random_seed=0, **options),
            self._notify,
            self._notify,
        )

    def generate(
        self,
        prompts: list[list[int]],
        *,
        seeds: list[int] | None = None,
        start_len: int = -1,
        adapters: list[str | None] | None = None,
        images: list[list[bytes]] | None = None,
        **params: Any,
    ) -> list[Request]:
        placed = [
            self._place(ids, found) for ids, found in zip(prompts, images or [], strict=False)
        ]
        requests = [
            Request(
                rid=f"r{i}",
                token_ids=list(ids),
                prompt_len=len(ids),
                params=parse_sampling_params(params),
                seed=seeds[i] if seeds else i,
                eos_ids=frozenset() if params.get("ignore_eos") else self.engine.eos_ids,
                return_logprob=True,
                logprob_start_len=start_len,
                adapter=self.engine.find_adapter(name) if name else None,
                images=placed[i] if placed else None,
            )
            for i, (ids, name) in enumerate(
                zip(prompts, adapters or [None] * len(prompts), strict=True)
            )
        ]
        self.engine.submit(requests)
        self.wait(requests)
        return requests

    def _place(self, ids: list[int], images: list[bytes]) -> PromptImages | None:
        tower = self.engine.runner.tower
        assert tower is not None or not images
        return place_images(ids, images, tower.processor) if tower and images else None

    def wait(self, requests: list[Request], timeout: float = 180.0) -> None:
        with self._done:
            finished = self._done.wait_for(
                lambda: self.engine.failure or self._ended.issuperset(requests), timeout
            )
        assert self.engine.failure is None, self.engine.failure
        assert finished, "requests did not finish in time"

    def close(self) -> None:
        self.engine.stop()

    def _notify(self, updated: list[Request] | None = None) -> None:
        with self._done:
            self._ended.update(request for request in updated or [] if request.finish)
            self._done.notify_all()


@contextlib.contextmanager
def local_engine(model_path: str | Path, **options: Any) -> Iterator[LocalEngine]:
    engine = LocalEngine(model_path, **options)
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True, kw_only=True)
class EngineServer:
    """A running server process; while it runs, slime's own HTTP clients send it the key."""

    url: str
    pid: int
    token: str = TOKEN
    log_path: Path | None = None

    def post(self, route: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> Any:
        return post_json(f"{self.url}{route}", body or {}, token=self.token, timeout=timeout)

    def get(self, route: str) -> Any:
        return get_json(f"{self.url}{route}", token=self.token)

    @property
    def state(self) -> dict[str, Any]:
        return self.get("/server_info")["internal_states"][0]

    @contextlib.contextmanager
    def under_way(self, *bodies: dict[str, Any]) -> Iterator[list[Future[Any]]]:
        """Requests which the engine has begun; what is left of them ends with the `with`.

        They must be so long that no delay of the caller lets them end by themselves: `LONG_CONTEXT`.
        """
        with ThreadPoolExecutor(len(bodies)) as pool:
            try:
                calls = [pool.submit(self.post, "/generate", body, 600.0) for body in bodies]
                wait_for(lambda: self.state["num_running_reqs"] == len(bodies))
                yield calls
            finally:
                self.post("/abort_request", {"abort_all": True})


@contextlib.contextmanager
def engine_server(
    model_path: str | Path, *options: str, token: str | None = TOKEN
) -> Iterator[EngineServer]:
    """`python -m slime.engine.server` at a free port; ended with the `with`."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port.json"
        log_file = Path(folder) / "log"
        command = ["-m", "slime.engine.server", "--model-path", str(model_path)]
        command += ["--port", "0", "--port-file", str(port_file), *options]
        env = {"OMP_NUM_THREADS": "1", "SLIME_ENGINE_TOKEN": token or ""}
        process = start_python(command, log_file, log_file, **env)
        try:
            deadline = time.monotonic() + 240
            while not port_file.exists():
                if process.exitcode is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the engine did not start:\n{log_file.read_text()}")
                time.sleep(0.05)
            url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
            remember_key([url], token)
            assert process.pid is not None
            yield EngineServer(url=url, pid=process.pid, log_path=log_file)
            forget_keys([url])
        finally:
            process.terminate()
            process.join(timeout=60)
            process.kill()
            process.join()


def assert_scored(server, name: str | None, tokens: list[int], expected, mask) -> None:
    """The engine's log-probs of the last tokens, with this adapter, are the expected ones."""
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": name,
    }
    reply = server.post("/generate", body)
    found = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]
    scored = np.array(found[-len(expected) :]) * mask
    np.testing.assert_allclose(scored, expected, rtol=0, atol=2e-4)
