"""Fixtures that several suites share: a rollout context, and the real SGLang server.

The server is started where SLIME_SGLANG_PYTHON says and a test asks for it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import parallel

SGLANG_LABEL = "v0"
parallel.avoid_amx()
parallel.limit_threads()


def pytest_collection_modifyitems(config, items):
    if not os.environ.get("SLIME_TEST_LONG"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: make test-long"))
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        parallel.sort_items(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return parallel.make_scheduler(config, log)


@pytest.fixture(scope="module", autouse=True)
def _restored_environment():
    """Undo what product code sets for libraries (GLOO_SOCKET_IFNAME, TORCHDYNAMO_DISABLE) in this process:
    runs that later files start would differ by the order of files."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def use_pool():
    """Make a new RolloutContext current until the test ends: `context = use_pool(pool, clock=...)`."""
    from slime.rollout.context import RolloutContext

    with ExitStack() as stack:

        def use(pool, **fields):
            return stack.enter_context(RolloutContext(pool=pool, **fields).active())

        yield use


@pytest.fixture(scope="session")
def sglang_checkpoint(tmp_path_factory) -> Path:
    from tests.tiny import make_tiny_checkpoint

    return make_tiny_checkpoint(tmp_path_factory.mktemp("first") / "m")


@pytest.fixture(scope="session")
def real_sglang(sglang_checkpoint: Path):
    from tests.sglang_server import sglang_server

    with sglang_server(sglang_checkpoint, SGLANG_LABEL, sglang_max_total_tokens=8192) as server:
        yield server
