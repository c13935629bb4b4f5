"""A stand-in for EnginePool inside the event loop: no HTTP, so that hundreds of schedules take seconds.

Each prompt has one right response, `response_of(prompt)`, which comes token by token; an abort answers
with the tokens that had come, and the next request continues behind them. A request that stalls has one
token and waits for an abort.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tests.tiny import EOS_ID, make_byte_tokenizer

EQUALS = make_byte_tokenizer().encode("=")[0]


def response_of(prompt: list[int]) -> list[int]:
    """4 to 23 tokens that depend on the prompt alone, then end-of-text."""
    seed = sum((i + 1) * token for i, token in enumerate(prompt))
    return [*(33 + (seed + 7 * i) % 60 for i in range(4 + seed % 20)), EOS_ID]


class ScriptedPool:
    def __init__(
        self,
        token_s: Callable[[list[int]], float] = lambda prompt: 0.0,
        stalls: Callable[[int, list[int]], bool] = lambda number, prompt: False,
    ) -> None:
        """`token_s`: seconds per token of a request on this prompt; `stalls`: by its number from 0."""
        self.token_s = token_s
        self.stalls = stalls
        self.version = 0
        self.num_requests = 0
        self.num_aborted = 0
        self.num_tokens = 0
        self.stalled: set[int] = set()  # requests that wait for an abort now
        self.prompts: list[list[int]] = []  # of each request
        self._live: dict[int, asyncio.Event] = {}

    async def generate(
        self, payload: dict[str, Any], session_id: str | None = None
    ) -> dict[str, Any]:
        number = self.num_requests
        self.num_requests += 1
        aborted = self._live[number] = asyncio.Event()
        ids = payload["input_ids"]
        cut = ids.index(EQUALS) + 1
        rest = response_of(ids[:cut])[len(ids) - cut :]
        limit = payload["sampling_params"]["max_new_tokens"]
        tokens, versions, kind = [], [], "stop"
        self.prompts.append(ids[:cut])
        speed, stalls = self.token_s(ids[:cut]), self.stalls(number, ids[:cut])
        try:
            for token in rest[:limit]:
                if stalls and tokens:
                    self.stalled.add(number)
                    await aborted.wait()
                elif speed:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(aborted.wait(), speed)
                if aborted.is_set():
                    kind = "abort"
                    self.num_aborted += 1
                    break
                tokens.append(token)
                versions.append(self.version)
                self.num_tokens += 1
        finally:
            del self._live[number]
            self.stalled.discard(number)
        if kind == "stop" and len(rest) > limit:
            kind = "length"
        return _reply(tokens, versions, kind)

    async def abort_all(self) -> None:
        for event in self._live.values():
            event.set()


def _reply(tokens: list[int], versions: list[int], kind: str) -> dict[str, Any]:
    finish: dict[str, Any] = {"type": kind}
    if kind == "stop":
        finish["matched"] = EOS_ID
    text = "x" * sum(token != EOS_ID for token in tokens)
    spans = [{"version": str(v), "start": i, "end": i + 1} for i, v in enumerate(versions)]
    return {
        "text": text,
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": finish,
            "weight_version": "0",
            "weight_versions": spans,
            "output_token_logprobs": [[-token / 100, token, None] for token in tokens],
        },
    }
