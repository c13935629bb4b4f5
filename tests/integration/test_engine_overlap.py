"""Steps whose tokens are read one step late, as on a GPU: the output is that of steps read at once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from slime.engine.models.model_runner import ModelRunner
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.step import PendingStep, Step, StepOutput
from slime.engine.server.app import EngineApp
from slime.engine.server.threads import ReplyHub
from tests.engines import LocalEngine, local_engine
from tests.tiny import make_tiny_checkpoint
from tests.waiting import wait_for

LOADS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 40},
    {"temperature": 0.9, "max_new_tokens": 30},
    {"temperature": 0.9, "top_p": 0.8, "max_new_tokens": 10},  # needs the tokens before
    {"temperature": 0, "max_new_tokens": 0},
    {"temperature": 0, "max_new_tokens": 1},
    {"temperature": 0, "max_new_tokens": 12, "min_new_tokens": 5},
]


@dataclass
class LateStep:
    pending: PendingStep
    blocks_next_step: bool

    def wait(self) -> StepOutput:
        return self.pending.wait()


class LateRunner:
    """Hands on every call; what it launches need not be read before the next step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_launched = 0
        self.on_launch: Callable[[int], None] = lambda count: None  # in the engine's thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, step: Step) -> LateStep:
        requests = step.decoding + [span.request for span in step.prefill]
        special = any(request.params.special for request in requests)
        self.num_launched += 1
        self.on_launch(self.num_launched)
        return LateStep(self._runner.launch(step), blocks_next_step=special)


@contextmanager
def late_engine(path: Path, **options: Any) -> Iterator[LocalEngine]:
    with local_engine(path, **options) as local:
        local.engine.runner = LateRunner(local.engine.runner)  # type: ignore[assignment]
        yield local


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 100))] for _ in range(16)]


def outcome(local: LocalEngine, prompts: list[list[int]]) -> list[tuple]:
    results: list[tuple] = []
    for load in LOADS:
        for request in local.generate(prompts, **load):
            assert request.finish is not None
            results.append((request.output_ids, request.finish.kind, request.finish.matched))
    # every page is back, including those of tokens sampled after the end
    assert local.engine.scheduler.pool.num_available == local.engine.sizes.num_pages
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_total_tokens": 256, "page_size": 8, "chunked_prefill_size": 24},
        {"max_running_requests": 3},
    ],
    ids=["plain", "full cache", "few at a time"],
)
def test_late_reading_changes_nothing(checkpoint: Path, prompts: list[list[int]], options: dict):
    with local_engine(checkpoint, **options) as local:
        expected = outcome(local, prompts)
    with late_engine(checkpoint, **options) as local:
        assert outcome(local, prompts) == expected
        if "max_total_tokens" in options:
            assert local.engine.scheduler.num_retracted > 0


def test_commands_find_all_tokens_read(checkpoint: Path):
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    request = Request(
        rid="a", token_ids=[1, 2, 3], prompt_len=3, params=params, seed=0, return_logprob=True
    )
    with late_engine(checkpoint) as local:
        engine, paused = local.engine, Future()

        def pause() -> None:
            engine.pause("in_place")
            paused.set_result(None)

        def on_launch(count: int) -> None:
            if count == 20:  # so many tokens are known, or about to be
                engine.call(pause)

        engine.runner.on_launch = on_launch  # type: ignore[attr-defined]
        engine.submit([request])
        paused.result(timeout=120)
        assert request.num_pending == 0 and request.num_computed == len(request.token_ids) - 1
        engine.weight_version = "next"
        engine.call(engine.resume).result()
        local.wait([request])
    first, second = request.version_spans
    assert (first.version, second.version) == ("default", "next")
    assert 0 < first.end == second.start < second.end == 400


def test_health_is_answered_without_reading_launched_steps(checkpoint: Path):
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    request = Request(rid="a", token_ids=[1, 2, 3], prompt_len=3, params=params, seed=0)
    unread: list[int] = []  # steps at each launch
    reached = threading.Event()

    async def ask_for_health(local: LocalEngine) -> int:
        hub = ReplyHub(asyncio.get_running_loop())
        async with TestClient(TestServer(EngineApp(local.engine, hub, None).make())) as client:
            local.engine.submit([request])
            await asyncio.to_thread(reached.wait, 60)
            async with client.get("/health") as reply:
                return reply.status

    with late_engine(checkpoint) as local:
        engine = local.engine

        def on_launch(count: int) -> None:
            unread.append(len(engine._pending_steps))
            if count == 20:
                reached.set()
                wait_for(lambda: engine._commands)  # the health check's

        engine.runner.on_launch = on_launch  # type: ignore[attr-defined]
        assert asyncio.run(ask_for_health(local)) == 200
        local.wait([request])
    assert unread == [0] + [1] * (len(unread) - 1)
