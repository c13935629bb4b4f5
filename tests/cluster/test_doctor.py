"""`slime doctor --cluster` before a job: equal nodes pass, a made-up difference is found and named."""

import json
import sys

import pytest

DOCTOR = [sys.executable, "-m", "slime.cli", "doctor", "--cluster", "--json"]


def test_equal_nodes_are_ok(cluster, tmp_path):
    cluster.settle()
    status, rows = _examine(cluster, tmp_path)
    # On cores that are busy with something else one of the links may well be slow.
    wrong = [row for name, row in rows.items() if row["status"] != "ok" and name != "bandwidth"]
    assert wrong == []
    assert status == (0 if rows["bandwidth"]["status"] == "ok" else 1)
    assert rows["nodes"]["found"] == "3 answer: 10.77.0.1, 10.77.0.2, 10.77.0.3"
    assert rows["connections"]["found"] == "6 ways, all open"
    assert rows["bandwidth"]["found"].count("Gbit/s") == 3
    assert rows["GPUs"]["found"].count("2 of 2 free") == 3
    assert list(tmp_path.iterdir()) == []


def test_an_odd_node_is_named(odd_cluster, tmp_path):
    """Another SGLang, a folder of its own, and an interface that does not exist."""
    status, rows = _examine(odd_cluster, odd_cluster.odd_folder)
    assert status == 1
    assert rows["sglang"]["status"] == "differs"
    assert "9.9.9 on 10.77.0.3" in rows["sglang"]["found"]
    folder = rows[f"folder {odd_cluster.odd_folder}"]
    assert folder["status"] == "fails" and "10.77.0.3: FileNotFoundError" in folder["found"]
    assert "10.77.0.3" in folder["advice"]
    gloo = rows["GLOO_SOCKET_IFNAME"]
    assert gloo["status"] == "fails" and "no such interface on 10.77.0.3" in gloo["found"]
    assert "10.77.0.3 has eth0, lo" in gloo["advice"]
    assert rows["python"]["status"] == rows["connections"]["status"] == "ok"
    # Ray still knows what the host was before it was started again.
    assert rows["nodes"]["found"] == "3 answer: 10.77.0.1, 10.77.0.2, 10.77.0.3"


def test_a_lost_node_is_named(cluster, tmp_path):
    """Gone so recently that Ray itself does not know it yet; the others are looked at all the same."""
    lost = cluster.network.hosts[2]
    cluster.leave(lost)
    try:
        status, rows = _examine(cluster, tmp_path)
    finally:
        cluster.rejoin(lost)
    assert status == 1
    assert rows["nodes"]["status"] == "fails", rows["nodes"]
    assert "2 answer: 10.77.0.1, 10.77.0.2; not 10.77.0.3" in rows["nodes"]["found"]
    assert "ray start --address=10.77.0.1:6379 on 10.77.0.3" in rows["nodes"]["advice"]
    assert rows["connections"]["found"] == "2 ways, all open"


def test_no_cluster_is_one_sentence(cluster):
    words = [*DOCTOR, "--address", f"{cluster.head.address}:1"]
    done = cluster.run(cluster.head, words, timeout=120)
    assert done.returncode == 1 and "no Ray cluster at 10.77.0.1:1" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_no_token_is_one_sentence(cluster):
    done = cluster.run(cluster.head, DOCTOR, timeout=120, RAY_AUTH_TOKEN_PATH="/no/token")
    assert done.returncode == 1 and "no Ray cluster at 10.77.0.1:6379" in done.stderr, done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def odd_cluster(cluster, tmp_path):
    """Host 2 with differences; afterwards it is as before."""
    odd = cluster.network.hosts[2]
    package = tmp_path / "site" / "sglang-9.9.9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    cluster.odd_folder = tmp_path / "shared"
    cluster.odd_folder.mkdir()
    own = f'mount -t tmpfs tmpfs {cluster.odd_folder} && exec "$@"'
    cluster.rejoin(
        odd,
        ["unshare", "--mount", "sh", "-c", own, "sh"],
        PYTHONPATH=f"{cluster.env['PYTHONPATH']}:{tmp_path / 'site'}",
        GLOO_SOCKET_IFNAME="bond7",
    )
    yield cluster
    cluster.rejoin(odd)
    cluster.settle()


def _examine(cluster, folder) -> tuple[int, dict[str, dict[str, str]]]:
    done = cluster.run(cluster.head, [*DOCTOR, "--save", str(folder)], timeout=200)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)["checks"]}
