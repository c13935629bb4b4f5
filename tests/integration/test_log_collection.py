"""Logs of other nodes come to the driver's folder; what it has already is left alone."""

import resource
import shutil
import tempfile

import pytest
import ray
from ray.cluster_utils import Cluster

from slime.ray.cluster import _MAX_LOG_BYTES, _on, _read_others, collect_logs


@pytest.fixture
def nodes(monkeypatch):
    folder = tempfile.mkdtemp(prefix="ray")
    # Not `temp_dir`: Cluster writes its address below the default folder, which may not exist.
    monkeypatch.setenv("RAY_TMPDIR", folder)
    options = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    for _ in range(2):  # these two share their filesystem
        cluster.add_node(**options)
    ray.init(address=cluster.address, log_to_driver=False)
    # A worker of each node is there: the time that collecting may take is none for starting one.
    ray.get(
        [_read_others.options(**_on(node["NodeID"])).remote(folder, []) for node in ray.nodes()]
    )
    yield
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_what_is_missing_comes(nodes, tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "trainer_1.log").write_bytes(b"rank 1\n")
    (there / "engine_0.log").write_bytes(b"x" * 10 + b"y" * _MAX_LOG_BYTES)
    (there / "trainer_0.log").write_bytes(b"another's\n")
    (there / "engine_0.port").write_bytes(b"1")
    (here / "trainer_0.log").write_bytes(b"mine\n")
    assert collect_logs(there, here) == ["engine_0.log", "trainer_1.log"]
    assert (here / "trainer_1.log").read_bytes() == b"rank 1\n"
    assert (here / "trainer_0.log").read_bytes() == b"mine\n"
    assert (here / "engine_0.log").read_bytes() == b"y" * _MAX_LOG_BYTES
    # Engines log their settings, keys among them: only the owner may read what was collected.
    for name in ("engine_0.log", "trainer_1.log"):
        assert (here / name).stat().st_mode & 0o777 == 0o600
    assert collect_logs(there, here) == []


def test_a_full_disk_costs_a_log_and_not_the_run(nodes, tmp_path, caplog):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "engine_0.log").write_bytes(b"x" * _MAX_LOG_BYTES)
    (there / "trainer_1.log").write_bytes(b"rank 1\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_LOG_BYTES // 2, limits[1]))
    try:
        copied = collect_logs(there, here)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert copied == ["trainer_1.log"]
    assert "log of another node is not copied" in caplog.text
