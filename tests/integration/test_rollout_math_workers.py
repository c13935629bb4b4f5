"""math-verify in worker processes: hard inputs cost their time limit and nothing else."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from slime.core.errors import UserError
from slime.rollout.rm_hub.math_reward import TIME_LIMIT_S, grade_deepscaler, grade_math
from slime.rollout.rm_hub.workers import Workers
from slime.utils.http import run
from tests.odd_texts import ODD

BUSY_S = 60.0  # a time limit for questions that have an answer, on a machine that stalls


@pytest.mark.parametrize("grade", [grade_math, grade_deepscaler], ids=["math", "deepscaler"])
def test_odd_text_never_raises_and_stays_in_its_time(grade):
    for text in ODD:
        start = time.monotonic()
        assert run(grade(f"</think>{text}", r"\frac{17}{3}")) in (0.0, 1.0)
        assert time.monotonic() - start < TIME_LIMIT_S + 60  # starting a worker included


def make_workers(count=1, time_limit_s=TIME_LIMIT_S):
    return Workers("math_answers", count=count, time_limit_s=time_limit_s)


async def equal(workers, answer, label):
    return bool(await workers.ask([label, answer]))


def test_a_worker_that_computes_too_long_is_replaced_and_nobody_else_waits():
    """Generation shares the event loop: it must keep turning while a comparison hangs."""

    async def scenario():
        workers = make_workers(count=1, time_limit_s=BUSY_S)
        assert await equal(workers, "x+x", "2x")
        workers.time_limit_s = 1.0
        start = time.monotonic()
        assert await equal(workers, "x^{9^{9^{9^9}}}", "10^{10^{10^{10}}}") is False
        assert 1.0 <= time.monotonic() - start < BUSY_S
        workers.time_limit_s = BUSY_S
        assert await equal(workers, "y+y", "2y")
        hanging = asyncio.create_task(equal(workers, "y^{9^{9^{9^9}}}", "10^{10^{10^{10}}}"))
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not hanging.done()
        hanging.cancel()
        await asyncio.wait([hanging])

    run(scenario())


def test_a_cancelled_question_does_not_answer_the_next_one():
    async def scenario():
        workers = make_workers(count=1, time_limit_s=BUSY_S)
        assert await equal(workers, "x+x", "2x")
        question = asyncio.create_task(equal(workers, "z+z", "2z"))
        await asyncio.sleep(0)
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        assert not await equal(workers, "x+1", "x+2")

    run(scenario())


def idle_worker(workers: Workers) -> psutil.Process:
    """The process that compares: the last one below the supervisor of its sandbox."""
    supervisor = psutil.Process(workers._idle._queue[0].pid)  # type: ignore[attr-defined]
    return supervisor.children(recursive=True)[-1]


def test_a_killed_worker_costs_no_answer():
    async def scenario():
        workers = make_workers(count=1, time_limit_s=BUSY_S)
        assert await equal(workers, "x+x", "2x")
        idle_worker(workers).kill()
        assert await equal(workers, "x+y", "y+x")
        assert not await equal(workers, "x+1", "x+2")

    run(scenario())


def test_a_worker_that_stood_still_is_no_answer():
    """As with a machine that stalls: a right answer must not be taken for wrong, least of all from then on."""

    async def scenario():
        workers = make_workers(count=1, time_limit_s=5.0)
        assert await equal(workers, "x+x", "2x")
        idle_worker(workers).suspend()
        assert await equal(workers, "x+y", "y+x")

    run(scenario())


def test_a_grader_that_cannot_start_is_an_error_and_not_a_zero(tmp_path, monkeypatch):
    """A Python without math-verify grades nothing."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"No module named 'math_verify'\" >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))

    async def scenario():
        with pytest.raises(UserError, match="No module named 'math_verify'"):
            await equal(make_workers(), "x+x", "2x")

    run(scenario())
