"""A Ray cluster over hosts, started with the commands the launch scripts use, token authentication on."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.cluster.hosts import Host, Network

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
RECONNECT_S = 20
_START_S = 120
_TRIES = 3
_SETTLED = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo
client = GcsClient(address=sys.argv[1])
def alive():
    nodes = client.get_all_node_info(timeout=30).values()
    return [node for node in nodes if node.state == GcsNodeInfo.GcsNodeState.ALIVE]
while len(alive()) != int(sys.argv[2]):
    time.sleep(1)
"""


class RayCluster:
    """Host 0 is the head; every host offers `slots` GPUs, which without a GPU are CPU processes."""

    def __init__(self, network: Network, *, slots: int | None, log_dir: Path):
        self.network, self.slots, self.log_dir = network, slots, log_dir
        self.folder = Path(tempfile.mkdtemp(prefix="rc"))  # socket paths must be short
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        self.head = network.hosts[0]
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_health_check_failure_threshold": "3",
            # How long everybody looks for a head that is gone; Ray's own default is 60.
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        }
        for name in ("RAY_ADDRESS", "SLIME_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            self.env.pop(name, None)
        self.nodes: dict[str, subprocess.Popen[str]] = {}  # by address
        self.other_slots: dict[str, int] = {}  # of hosts that have not as many as the rest
        self._started: list[subprocess.Popen[str]] = []

    @property
    def address(self) -> str:
        return f"{self.head.address}:6379"

    @property
    def dashboard(self) -> str:
        return f"http://{self.head.address}:8265"

    def start(self) -> None:
        head = ["--head", f"--node-ip-address={self.head.address}", "--disable-usage-stats"]
        self._start_node(self.head, [*head, "--dashboard-host=0.0.0.0", "--dashboard-port=8265"])
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._join, self.network.hosts[1:]))

    def popen(self, host: Host, words: list[str], **env: str) -> subprocess.Popen[str]:
        """A process on a host, in a process group of its own."""
        process = subprocess.Popen(
            host.command(words),
            cwd=ROOT,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(
        self, host: Host, words: list[str], timeout: float = 60, **env: str
    ) -> subprocess.CompletedProcess[str]:
        env = {"RAY_ADDRESS": self.address, **env}
        return subprocess.run(
            host.command(words),
            cwd=ROOT,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def pids(self, host: Host, pattern: str) -> list[int]:
        """Processes of one host whose command line or title has `pattern`."""
        words = ["ip", "netns", "pids", host.name]
        found = []
        for pid in map(int, subprocess.run(words, capture_output=True, text=True).stdout.split()):
            with contextlib.suppress(psutil.Error):
                if pattern in " ".join(psutil.Process(pid).cmdline()):
                    found.append(pid)
        return found

    def leave(self, host: Host) -> None:
        """End Ray on a host that is not the head, which hears of it later."""
        self.end(self.pids(host, ""))
        self.nodes[host.address].wait(timeout=30)

    def rejoin(self, host: Host, wrapper: Sequence[str] = (), **env: str) -> None:
        """End Ray there, and start it again, perhaps in another setting; for a while Ray knows two."""
        self.leave(host)
        self._join(host, wrapper, env)

    def settle(self) -> None:
        """Until Ray knows every host once."""
        words = [sys.executable, "-c", _SETTLED, self.address, str(len(self.network.hosts))]
        done = self.run(self.head, words, timeout=180)
        assert done.returncode == 0, done.stderr

    def restart(self) -> None:
        """Ray anew on all hosts, whatever is left of it."""
        self.end_all()
        self.start()

    def end(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """End what runs on our hosts, and nothing else."""
        for host in self.network.hosts:
            self.network.restore(host)
            self.end(self.pids(host, ""))
        for process in [*self.nodes.values(), *self._started]:
            process.wait(timeout=30)

    def close(self) -> None:
        self.end_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _join(
        self, host: Host, wrapper: Sequence[str] = (), env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        words = [f"--address={self.address}", f"--node-ip-address={host.address}"]
        self._start_node(host, [*words, "--disable-usage-stats"], wrapper, env)

    def _start_node(
        self,
        host: Host,
        words: list[str],
        wrapper: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Until Ray says that the node is up; on busy cores its own 30 s do not always do."""
        for _ in range(_TRIES):
            node = self.nodes[host.address] = self._spawn_node(host, words, wrapper, env)
            log = self.log_dir / f"{host.address}.log"
            deadline = time.monotonic() + _START_S
            while "Ray runtime started" not in log.read_text() and node.poll() is None:
                assert time.monotonic() < deadline, f"no Ray on {host}:\n{log.read_text()}"
                time.sleep(0.2)
            if node.poll() is None:
                return
        raise AssertionError(f"no Ray on {host}:\n{log.read_text()}")

    def _spawn_node(
        self, host: Host, words: list[str], wrapper: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        folder = self.folder / host.name[-2:]
        command = [RAY, "start", *words, "--block", f"--temp-dir={folder}", "--num-cpus=2"]
        command += ["--object-store-memory=100000000"]
        slots = self.other_slots.get(host.address, self.slots)
        if slots is not None:
            command.append(f"--num-gpus={slots}")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with (self.log_dir / f"{host.address}.log").open("w") as log:
            return subprocess.Popen(
                host.command([*wrapper, *command]),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.env, **env},
                start_new_session=True,
                text=True,
            )
