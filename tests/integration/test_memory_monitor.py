"""An actor that Ray's memory monitor kills is a dead actor, as the run's waits see it."""

from __future__ import annotations

import shutil
import tempfile
import time

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from slime.ray.remote import ACTOR_DIED
from slime.ray.watch import _death


@pytest.fixture
def no_memory():
    """A cluster whose node seems to have no memory left, so that its raylet kills workers."""
    folder = tempfile.mkdtemp(prefix="ray")
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        _temp_dir=folder,
        _system_config={"memory_usage_threshold": 0.0, "memory_monitor_refresh_ms": 500},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@ray.remote(max_restarts=0, num_cpus=0)
class Sleeper:
    def sleep(self) -> None:
        time.sleep(300)


def test_an_actor_killed_for_memory_is_dead(no_memory):
    reference = Sleeper.remote().sleep.remote()
    assert ray.wait([reference], timeout=120)[0]
    with pytest.raises(OutOfMemoryError) as caught:
        ray.get(reference)
    assert isinstance(caught.value, ACTOR_DIED)
    assert isinstance(_death(reference), OutOfMemoryError)
