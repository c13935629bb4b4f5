"""Keys of a run on a Ray cluster: in no log of Ray's, on no command line."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.launch.site import free_ports
from tests.waiting import wait_for

RAY = str(Path(sys.executable).parent / "ray")
# Starts an actor as a run does; while it lives, reads every command line of this machine.
DRIVER = """
import json, sys
from pathlib import Path
from slime.ray.cluster import actor_env, connect
from slime.ray.remote import Remote
from tests.integration.test_keys_on_a_cluster import Seen

assert not connect()
token, password = sys.stdin.read().split()
env = actor_env(1, token=token, several_nodes=False)
env |= {"NCCL_DEBUG": "WARN", "AWS_SECRET_ACCESS_KEY": password}
actor = Remote({"num_cpus": 0, "runtime_env": {"env_vars": env}}, lambda: Seen)
names = ["SLIME_ENGINE_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG"]
print(json.dumps([actor.get(lambda seen: seen.variable(name), timeout=240) for name in names]))
for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = path.read_bytes()
    except OSError:
        continue
    assert token.encode() not in words and password.encode() not in words, words
"""


class Seen:
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # socket paths must be short
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "token").chmod(0o600)
    port, agent, grpc = free_ports(3)
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "PYTHONPATH": str(ROOT),
    }
    words = f"start --head --block --disable-usage-stats --node-ip-address=127.0.0.1 --port={port} "
    words += f"--temp-dir={folder}/ray --num-cpus=1 --object-store-memory=100000000 "
    words += f"--include-dashboard=false --dashboard-agent-listen-port={agent} "
    words += f"--dashboard-agent-grpc-port={grpc}"
    log = folder / "start.log"
    with log.open("wb") as output:
        head = subprocess.Popen(
            [RAY, *words.split()], env=env, stdout=output, stderr=subprocess.STDOUT
        )
    yield folder, {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}, head, log
    head.terminate()
    head.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


def test_keys_reach_the_actor_and_nothing_else(cluster):
    folder, env, head, log = cluster
    wait_for(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None)
    assert head.poll() is None, log.read_text()
    token, password = secrets.token_hex(16), secrets.token_hex(16)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        env=env,
        input=f"{token} {password}",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f'["{token}", "{password}", "WARN"]'
    logs = [path for path in (folder / "ray").rglob("*") if path.is_file()]
    assert any("NCCL_DEBUG" in path.read_text(errors="replace") for path in logs)  # they are read
    for path in logs:
        text = path.read_text(errors="replace")
        assert token not in text and password not in text, path
