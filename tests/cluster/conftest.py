from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime.cli.quickstart_task import write_data, write_model
from tests.cluster.hosts import Network, why_not
from tests.cluster.ray_cluster import RayCluster
from tests.cluster.task import Task


def pytest_collection_modifyitems(items):
    """Minutes of many processes: `make test-cluster` asks for them, `make test` does not."""
    if os.environ.get("SLIME_TEST_CLUSTER") != "1":
        reason = "several hosts in network namespaces: make test-cluster"
    else:
        reason = why_not()
    here = Path(__file__).parent
    for item in items:
        if reason is not None and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Three hosts with two slots each; host 0 is the head."""
    network = Network(3)
    cluster = RayCluster(network, slots=2, log_dir=tmp_path_factory.mktemp("ray"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        network.close()


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Task:
    """The model and the data of the quickstart."""
    folder = tmp_path_factory.mktemp("task")
    data = write_data(folder / "data", num_warmup=1, num_train=64, num_heldout=4, seed=1)
    write_model(folder / "model", seed=1)
    return Task(model=folder / "model", train=data.train, heldout=data.heldout)
