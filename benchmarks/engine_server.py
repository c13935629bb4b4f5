"""Engines of the benchmarks as processes of their own, asked over HTTP by all requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

from engine_shapes import Row  # noqa: E402

from slime.utils.sync_http import HttpError, post_json  # noqa: E402

TOKEN = "benchmark"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
STOP_S = 20.0


class EngineFailed(Exception):
    """An engine did not start, or answered something else than tokens."""


def engine_command(checkpoint: Path) -> list[str]:
    command = [sys.executable, "-m", "slime.engine.server", "--model-path", str(checkpoint)]
    return [*command, "--load-format", "dummy", "--skip-tokenizer-init", "--log-level", "info"]


def sglang_command(
    checkpoint: Path, attention: str, requests: int = 256, load_format: str = "dummy"
) -> list[str]:
    """Return how SGLang is started; with dummy weights it cannot load adapters."""
    import torch

    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    command += ["--load-format", load_format, "--skip-tokenizer-init"]
    command += ["--attention-backend", attention]
    command += ["--max-running-requests", str(requests)]
    if not torch.cuda.is_available():
        return [*command, "--device", "cpu"]
    return [*command, "--cuda-graph-max-bs-decode", str(requests)]


class Server:
    """Starts in the background when it is made; `with` waits until it answers.

    Two of them start at the same time, and both answer before either is measured.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        extra_path: str | None,
        start_limit: float,
    ) -> None:
        self.name, self._start_limit = name, start_limit
        # Below the ports that the kernel gives to connections, 32768 and above.
        port = 20000 + os.getpid() % 1000 + sum(map(ord, name)) % 1000
        self.url = f"http://127.0.0.1:{port}"
        path = ([extra_path] if extra_path else [str(REPO)]) + [os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "SLIME_ENGINE_TOKEN": TOKEN, "PYTHONPATH": ":".join(path)}
        env["SGLANG_MM_AVOID_RETOKENIZE"] = (
            "1"  # the tokens of a prompt with images stay as they are
        )
        self._log = folder / f"{name}.log"
        self._begin, self._ready = time.perf_counter(), False
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)], env=env, stdout=log, stderr=log
            )

    def __enter__(self) -> Server:
        self.wait()
        return self

    def wait(self) -> None:
        """Return when it answers; EngineFailed if it has ended, or its time is over."""
        if self._ready:
            return
        while not self._answers():
            late = time.perf_counter() - self._begin > self._start_limit
            if late or self._process.poll() is not None:
                self.stop()
                why = f"in {self._start_limit:.0f} s" if late else "at all"
                log = self._log.read_text()[-6000:]
                raise EngineFailed(f"{self.name} did not start {why}:\n{log}")
            time.sleep(0.5)
        print(f"  {self.name}: started in {time.perf_counter() - self._begin:.0f} s", flush=True)
        self._ready = True

    def __exit__(self, *error: object) -> None:
        self.stop()
        if error[0] is not None:
            print(self._log.read_text()[-6000:], flush=True)

    def stop(self) -> None:
        """End the process and its children, and wait: the next one needs their memory."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, STOP_S)

    def forget(self) -> None:
        """Empty the prefix cache, so that later passes do not find the prompts of earlier ones."""
        post_json(f"{self.url}/flush_cache", {}, token=TOKEN)

    def generate(self, rows: list[Row]) -> list[float]:
        """Return the seconds until each reply."""
        return asyncio.run(self._generate(rows))

    def timed(self, rows: list[Row]) -> float:
        start = time.perf_counter()
        self.generate(rows)
        return time.perf_counter() - start

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            return False
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
        try:
            post_json(f"{self.url}/generate", body, token=TOKEN, timeout=60)
        except (HttpError, OSError):
            return False
        return True

    async def _generate(self, rows: list[Row]) -> list[float]:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(self._request(session, row) for row in rows))

    async def _request(self, session: aiohttp.ClientSession, row: Row) -> float:
        params = {"max_new_tokens": row["max_new_tokens"], "temperature": 0.6, "ignore_eos": True}
        prompt = row["prompt_ids"]
        sent = row.get("sglang_ids", prompt) if self.name == "sglang" else prompt
        body: dict[str, Any] = {"input_ids": sent, "sampling_params": params}
        body["return_logprob"] = True
        body |= {key: row[key] for key in ("lora_path", "image_data") if key in row}
        start = time.perf_counter()
        async with session.post(
            f"{self.url}/generate", data=orjson.dumps(body), headers=JSON
        ) as response:
            reply = orjson.loads(await response.read())
        if "meta_info" not in reply:
            raise EngineFailed(f"{self.name} answered {str(reply)[:500]}")
        found = len(reply["meta_info"]["output_token_logprobs"])
        if found != row["max_new_tokens"]:
            raise EngineFailed(f"{found} tokens came back, {row['max_new_tokens']} were asked for")
        read = reply["meta_info"]["prompt_tokens"]
        if read != len(prompt):
            raise EngineFailed(f"{self.name} read {read} prompt tokens, not {len(prompt)}")
        return time.perf_counter() - start
