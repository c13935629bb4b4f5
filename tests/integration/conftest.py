"""Fixtures of the integration tests."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from slime.rollout.engine_pool import EnginePool
from tests import rollout_hooks
from tests.fake_engine import FakeEngine, Reply
from tests.rank_pool import end_workers


@pytest.fixture(scope="package", autouse=True)
def _ranks_end_with_this_folder():
    yield
    end_workers()


@pytest.fixture
def fake_engines(use_pool):
    """Starts engines and makes a pool of them current: `fake_engines(script, count=2, concurrency=4)`."""
    rollout_hooks.seen.clear()
    with ExitStack() as stack:

        def start(script=lambda request: Reply(), count=1, **pool_options):
            started = [stack.enter_context(FakeEngine(script)) for _ in range(count)]
            use_pool(EnginePool([engine.url for engine in started], **pool_options))
            return started

        yield start
