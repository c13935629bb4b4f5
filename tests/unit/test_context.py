"""RolloutContext: who finds it, and what two rollouts of one run share."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.rollout import context as context_module
from slime.rollout.context import GenerationState, RolloutContext, current_generation, is_aborting
from slime.rollout.engine_pool import EnginePool
from slime.rollout.hook_calls import in_thread, on_hook_loop
from slime.utils import http


def make_context() -> RolloutContext:
    return RolloutContext(pool=EnginePool([]))


async def find() -> RolloutContext:
    return RolloutContext.current()


def test_tasks_hook_threads_and_both_event_loops_inherit_it():
    async def find_everywhere():
        task = asyncio.create_task(find())
        thread = await in_thread(RolloutContext.current)
        return [await find(), await task, thread, await on_hook_loop(find())]

    with make_context().active() as context:
        assert all(found is context for found in http.run(find_everywhere()))


def test_a_plain_thread_finds_the_one_that_is_shared(monkeypatch):
    monkeypatch.setattr(context_module, "_of_process", None)
    context = make_context()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="no rollout context"):
            pool.submit(RolloutContext.current).result()
        context.share()
        assert pool.submit(RolloutContext.current).result() is context
        with make_context().active() as own:
            assert RolloutContext.current() is own


def test_a_plain_thread_finds_it_only_with_a_copied_context():
    found: list[object] = []

    def look() -> None:
        try:
            found.append(RolloutContext.current())
        except RuntimeError as error:
            found.append(str(error))

    with make_context().active() as context:
        for target, args in ((look, ()), (contextvars.copy_context().run, (look,))):
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
    assert "no rollout context" in str(found[0]) and found[1] is context


def test_contexts_nest_and_end():
    outer, inner = make_context(), make_context()
    with outer.active():
        with inner.active():
            assert RolloutContext.current() is inner
        assert RolloutContext.current() is outer
    with pytest.raises(RuntimeError, match="no rollout context"):
        RolloutContext.current()


def test_rollouts_share_the_run_and_abort_alone():
    run = make_context()
    training = run.for_generation(GenerationState())
    evaluation = run.for_generation(GenerationState())
    assert training.pool is evaluation.pool and training.clock is evaluation.clock
    assert training.progress is evaluation.progress
    assert training.shared("key", object) is evaluation.shared("key", object)
    assert training.generation is not None
    training.generation.aborting = True
    with training.active():
        assert is_aborting()
    with evaluation.active():
        assert not is_aborting()
    with run.active():
        assert not is_aborting() and not current_generation().keep_partial
