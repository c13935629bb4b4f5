"""The pool with a router in front of its engines."""

from slime.rollout.engine_pool import EnginePool
from slime.utils import http
from tests.fake_engine import FakeEngine, Reply

PAYLOAD = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}


def test_requests_go_to_the_router_and_aborts_to_the_engines():
    with FakeEngine() as router, FakeEngine() as first, FakeEngine() as second:
        router.script = lambda request: Reply(until=lambda: router.max_in_flight >= 4)
        pool = EnginePool([], concurrency=2)
        pool.set_urls([first.url, second.url], router.url)
        assert pool.urls == [first.url, second.url]

        async def many():
            return await http.gather([pool.generate(dict(PAYLOAD)) for _ in range(12)])

        assert len(http.run(many())) == 12
        assert len(router.requests) == 12 and not first.requests and not second.requests
        assert router.max_in_flight == 4  # two for each engine behind it
        http.run(pool.abort_all())
        assert (router.num_aborts, first.num_aborts, second.num_aborts) == (0, 1, 1)
        pool.set_urls([second.url])
        http.run(pool.generate(dict(PAYLOAD)))
        assert len(second.requests) == 1
