"""The pool alone: many waiters, cancellations, sessions, and engines that come and go."""

from __future__ import annotations

import asyncio
import threading

import pytest

from slime.rollout.engine_pool import EnginePool, EngineRefusedError, EngineUnreachableError
from slime.utils.http import run
from tests.fake_engine import FakeEngine, Reply, Request

PAYLOAD = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


class CountingPool(EnginePool):
    looks = 0  # for an engine to go to

    def _choose(self, session_id: str | None) -> str | None:
        self.looks += 1
        return super()._choose(session_id)


def test_thousands_of_waiters_are_served_in_order_without_busy_waiting():
    with FakeEngine() as engine:

        async def scenario():
            pool = CountingPool([engine.url], concurrency=4)
            order = []

            async def one(number):
                await pool.generate(PAYLOAD)
                order.append(number)

            await asyncio.gather(*(one(number) for number in range(3000)))
            assert pool.in_flight == {engine.url: 0}
            return order, pool.looks

        order, looks = run(scenario())
    assert max(abs(place - number) for place, number in enumerate(order)) < 50
    assert looks <= 2 * 3000  # each when it comes and when it is woken for a slot
    assert engine.max_in_flight <= 4


def test_cancelled_waiters_and_calls_free_their_slots():
    opened = threading.Event()
    with FakeEngine(lambda request: Reply(until=opened.is_set)) as engine:

        async def scenario():
            pool = EnginePool([engine.url], concurrency=2)
            tasks = [asyncio.create_task(pool.generate(PAYLOAD)) for _ in range(20)]
            while engine.in_flight < 2:
                await asyncio.sleep(0.01)
            for task in tasks[1::2]:
                task.cancel()
            opened.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(result, dict) for result in results) == 10
            assert pool.in_flight == {engine.url: 0}
            await asyncio.wait_for(pool.generate(PAYLOAD), 60)

        run(scenario())


def test_a_woken_waiter_that_is_cancelled_passes_its_slot_on():
    with FakeEngine(lambda request: Reply(latency_s=0.05)) as engine:

        async def scenario():
            pool = EnginePool([engine.url], concurrency=1)
            first = asyncio.create_task(pool.generate(PAYLOAD))
            await asyncio.sleep(0)
            second = asyncio.create_task(pool.generate(PAYLOAD))
            third = asyncio.create_task(pool.generate(PAYLOAD))
            first.add_done_callback(lambda _: second.cancel())  # just as it is woken
            await asyncio.wait_for(third, 60)

        run(scenario())


def test_sessions_stay_on_their_engine_while_it_is_not_much_busier():
    with FakeEngine(lambda r: Reply(latency_s=0.2)) as one, FakeEngine() as two:

        async def scenario():
            pool = EnginePool([one.url, two.url], concurrency=64)
            for _ in range(3):
                await pool.generate(PAYLOAD, session_id="a")
            assert len(one.requests) == 3 and not two.requests
            await asyncio.gather(*(pool.generate(PAYLOAD, session_id="a") for _ in range(24)))
            assert two.requests  # rather than one engine being 24 ahead of the other

        run(scenario())


def test_an_engine_that_comes_back_is_used_again():
    with FakeEngine() as engine:

        async def scenario():
            pool = EnginePool([engine.url], deadline_s=120)
            await pool.generate(PAYLOAD)
            await asyncio.to_thread(engine.stop)
            waiting = asyncio.create_task(pool.generate(PAYLOAD))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await asyncio.to_thread(engine.restart)
            assert (await asyncio.wait_for(waiting, 100))["text"] == "ok"

        run(scenario())


def test_deadlines_and_refusals():
    with FakeEngine(lambda request: Reply(text="too long", status=400)) as engine:

        async def scenario():
            with pytest.raises(EngineRefusedError, match="too long"):
                await EnginePool([engine.url]).generate(PAYLOAD)
            with pytest.raises(EngineUnreachableError, match="no engine was available"):
                await EnginePool([], deadline_s=0.2).generate(PAYLOAD)
            with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:9"):
                await EnginePool(["http://127.0.0.1:9"], deadline_s=0.2).generate(PAYLOAD)

        run(scenario())


def test_a_long_request_does_not_use_up_the_deadline_of_its_retry():
    """The deadline counts from the first failure, not from when the request was made."""

    def script(request):
        return Reply(latency_s=1.0, drop=True) if request.number == 0 else Reply()

    with FakeEngine(script) as engine:
        reply = run(EnginePool([engine.url], deadline_s=0.5).generate(PAYLOAD))
    assert reply["text"] == "ok"


def test_time_in_which_an_engine_worked_is_no_part_of_the_deadline():
    """Lost at once, then after longer than the deadline; the third attempt is answered."""
    replies = [Reply(drop=True), Reply(latency_s=1.5, drop=True), Reply()]
    with FakeEngine(lambda request: replies[min(request.number, 2)]) as engine:
        reply = run(EnginePool([engine.url], deadline_s=1.2).generate(PAYLOAD))
        assert reply["text"] == "ok" and len(engine.requests) == 3


def test_time_in_which_a_removed_engine_worked_is_no_part_of_the_deadline():
    """Lost at once, then at work on an engine that is removed, then lost again before it is answered."""

    async def scenario(first: FakeEngine, second: FakeEngine) -> dict:
        pool = EnginePool([first.url], deadline_s=1.2)
        task = asyncio.create_task(pool.generate(PAYLOAD))
        while not first.requests:
            await asyncio.sleep(0.01)
        pool.set_urls([second.url])
        while not second.in_flight:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)
        pool.set_urls([first.url])
        return await task

    replies = [Reply(drop=True), Reply(drop=True), Reply()]
    never = threading.Event()
    with (
        FakeEngine(lambda request: replies[min(request.number, 2)]) as first,
        FakeEngine(lambda request: Reply(until=never.is_set)) as second,
    ):
        assert run(scenario(first, second))["text"] == "ok"
        assert len(first.requests) == 3
        never.set()


@pytest.mark.parametrize("num_late", [1, 2])
def test_a_request_that_times_out_is_retried_once_at_least(num_late):
    """Even if it took longer than the deadline: its engine may have hung while others work."""
    never = threading.Event()

    def script(request: Request) -> Reply:
        return Reply(until=never.is_set) if request.number < num_late else Reply()

    with FakeEngine(script) as engine:
        pool = EnginePool([engine.url], deadline_s=1.0, request_timeout_s=2.0)
        if num_late == 1:
            assert run(pool.generate(PAYLOAD))["text"] == "ok"
        else:
            with pytest.raises(EngineUnreachableError, match="failed with: TimeoutError"):
                run(pool.generate(PAYLOAD))
        never.set()
    assert len(engine.requests) == 2
