"""The documented cluster route: `ray start --head`, then `ray job submit -- python3 train.py`."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.launch.site import free_ports

RAY = str(Path(sys.executable).parent / "ray")
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(16),
}  # what the head turns on, its clients must too


@pytest.fixture
def cluster(tmp_path):
    """A head node of our own on free ports; only this process group is ended afterwards."""
    dashboard, head_port, client, listen, grpc = free_ports(5)
    words = [RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=2"]
    words += ["--node-ip-address=127.0.0.1", f"--port={head_port}"]
    words += [
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        "--include-dashboard=true",
        f"--ray-client-server-port={client}",  # another cluster may have the usual ones
        f"--dashboard-agent-listen-port={listen}",
        f"--dashboard-agent-grpc-port={grpc}",
    ]
    folder = tempfile.mkdtemp(prefix="ray")  # socket paths must be short
    words += [f"--temp-dir={folder}", "--object-store-memory=200000000"]
    log = (tmp_path / "head.log").open("w+")
    head = subprocess.Popen(
        words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        runs.wait_for(lambda: _accepts(dashboard), head, timeout=120)
        yield address
    finally:
        head.terminate()  # it ends the processes it started
        head.wait(timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_job_submit_runs_the_same_command_line(cluster, tiny_model, tiny_data, tmp_path):
    variables = json.dumps({"MY_TOKEN": "open-sesame", "NCCL_DEBUG": "WARN"})
    words = {"num_rollout": 1, "train_env_vars": variables}
    flags = runs.command(tiny_model, tiny_data, tmp_path / "run", **words)
    environment = {"env_vars": {"PYTHONPATH": str(runs.ROOT), "NCCL_IB_TC": "160"}}
    done = _submit(cluster, environment, flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["rollout_id"] for record in runs.metrics(tmp_path / "run", "train")] == [0]
    assert f"Ray dashboard: {cluster}" in done.stdout
    _check_environment(tmp_path / "run" / "logs")


def _check_environment(logs: Path) -> None:
    """The job's variables are in all processes, --train-env-vars in the trainer; secrets are hidden."""
    trainer, rollout = ((logs / f"{name}.log").read_text() for name in ("trainer_0", "rollout"))
    assert "NCCL_IB_TC=160" in trainer and "NCCL_IB_TC=160" in rollout
    assert "NCCL_DEBUG=WARN" in trainer and "NCCL_DEBUG" not in rollout
    assert "MY_TOKEN=***" in trainer
    assert (logs / "engine_0.log").stat().st_size


def _submit(cluster: str, environment: dict, flags: list[str]) -> subprocess.CompletedProcess[str]:
    """`ray job submit`; a head that has just started refuses until its agent is up."""
    deadline = time.monotonic() + 120
    while True:
        done = subprocess.run(
            [
                RAY,
                "job",
                "submit",
                f"--address={cluster}",
                f"--runtime-env-json={json.dumps(environment)}",
                "--",
                sys.executable,
                str(runs.ROOT / "train.py"),
                *flags,
            ],
            capture_output=True,
            text=True,
            timeout=300,
            env=ENVIRONMENT,
        )
        if "No available agent" not in done.stdout + done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(2)
