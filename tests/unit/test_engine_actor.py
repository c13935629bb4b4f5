"""Engine actors without Ray: the file with the key, and actors that Ray's memory monitor killed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import yaml
from ray.exceptions import ActorDiedError, OutOfMemoryError

from slime.ray.engine_actor import EngineActor, EngineHandle
from slime.ray.engine_group import EngineGroup
from slime.ray.watch import LostError
from tests.args import make_args


@pytest.mark.parametrize("key", ["01234567", "1_000", "yes", "a: b", '"#', "plain"])
def test_sglang_reads_the_key_as_it_is(tmp_path, monkeypatch, key):
    monkeypatch.setenv("SLIME_ENGINE_TOKEN", key)
    path = EngineActor(make_args(run_dir=str(tmp_path)), 0)._write_config("start-1")
    with open(path) as file:
        config = yaml.safe_load(file)
    assert config == {"api-key": key, "admin-api-key": key, "weight-version": "start-1"}


DEATHS = [ActorDiedError(), OutOfMemoryError("memory on the node was 0.96, above 0.95")]


class Dead:
    """A handle on an actor that died: Ray raises this error for every call."""

    def __init__(self, error: Exception):
        self.error = error

    def call(self, method: Callable[[Any], Any]) -> Any:
        raise self.error

    def get(self, method: Callable[[Any], Any], *, timeout: float) -> Any:
        raise self.error


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
def test_an_engine_whose_actor_was_killed_is_not_alive(error):
    handle = EngineHandle.__new__(EngineHandle)  # `__init__` starts actors
    handle._actors = [Dead(error)]  # pyright: ignore[reportAttributeAccessIssue]
    assert not handle.alive(timeout=1.0)
    assert handle.last_lines(15) == ""


@pytest.mark.parametrize("error", DEATHS, ids=lambda error: type(error).__name__)
def test_an_actor_killed_while_its_engine_starts_is_a_lost_engine(error):
    group = EngineGroup(make_args(use_fault_tolerance=False), [], token="")
    started: Future[Any] = Future()
    started.set_exception(error)
    group._starting = [started]
    with pytest.raises(LostError, match="engine 0 died while it started"):
        group.wait()
