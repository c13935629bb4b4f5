"""One run over three hosts, with both ways for weights to get from host to host."""

import json
import re
import sys

from tests.cluster.ray_cluster import RAY, ROOT
from tests.e2e import runs

TRAIN = str(ROOT / "train.py")


def test_a_submitted_job_trains_across_hosts(cluster, task, tmp_path):
    """The seeds' `ray job submit` at the head; weights by broadcast from host to host."""
    cluster.settle()
    words = task.command(tmp_path / "run", update_weight_transport="distributed")
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    submit = [RAY, "job", "submit", f"--address={cluster.dashboard}"]
    submit += [f"--runtime-env-json={json.dumps(environment)}", "--", sys.executable, TRAIN]
    done = cluster.run(cluster.head, [*submit, *words], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    _check(tmp_path / "run")


def test_weights_by_disk(cluster, task, tmp_path):
    words = task.command(tmp_path / "run", update_weight_transport="disk")
    done = cluster.run(cluster.head, [sys.executable, TRAIN, *words], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    _check(tmp_path / "run")


def _check(run_dir) -> None:
    trained = runs.metrics(run_dir, "train")
    assert [record["rollout_id"] for record in trained] == [0, 1]
    # An engine with other weights than the trainer's would give other log-probs.
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    assert all(record["train/grad_norm"] > 0 for record in trained), trained
    log = (run_dir / "logs" / "engine_0.log").read_text()
    assert re.search(r"engine ready at http://10\.77\.0\.\d:", log), log
