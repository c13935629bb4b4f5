"""One look at one node of a cluster: what is installed, which networks it has, what it reaches."""

from __future__ import annotations

import platform
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from slime.config.env import child_env
from slime.utils import machine

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PACKAGES = ("slime", "torch", "transformers", "ray", "megatron-core", "sglang", "sglang-router")
_CHUNK = bytes(1 << 20)
_TIMEOUT_S = 5.0


@dataclass(kw_only=True, frozen=True)
class NodeFacts:
    address: str  # the one Ray knows it by
    versions: dict[str, str]  # name -> version, "none" where it is not installed
    gpus: int
    busy_gpus: int  # with memory in use
    interfaces: dict[str, str]  # name -> IPv4 address
    wanted: dict[str, str]  # GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME where they are set


class Scout:
    """Lives on one node while a cluster is examined."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def facts(self) -> NodeFacts:
        gpus, environment = machine.gpus(), child_env()
        versions = {name: machine.package_version(name) or "none" for name in _PACKAGES}
        return NodeFacts(
            address=ray.util.get_node_ip_address(),
            versions={
                "python": platform.python_version(),
                **versions,
                "CUDA of torch": machine.torch_cuda_version() or "none",
                "driver": gpus[0].driver if gpus else "none",
            },
            gpus=len(gpus),
            busy_gpus=machine.busy_gpus(),
            interfaces=_interfaces(),
            wanted={name: environment[name] for name in INTERFACE_VARIABLES if name in environment},
        )

    def clock(self) -> float:
        return time.time()

    # ---- folder

    def write(self, folder: str) -> tuple[str, str]:
        """A file for the others to read, and what it holds."""
        path, text = Path(folder) / f".slime-doctor-{secrets.token_hex(8)}", secrets.token_hex(8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path), text

    def read(self, path: str) -> str:
        """What it holds here; an error in words where it cannot be read."""
        try:
            return Path(path).read_text()
        except OSError as error:
            return f"{type(error).__name__}: {error.strerror}"

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    # ---- network

    def listen(self, address: str) -> int:
        """Take in whatever comes at a free port of `address`, until `hang_up`."""
        self._listener = socket.create_server((address, 0))
        threading.Thread(target=_swallow, args=(self._listener,), daemon=True).start()
        return self._listener.getsockname()[1]

    def hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def reach(self, address: str, port: int) -> str:
        """'' when it can be connected to, else why not."""
        try:
            socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
        except OSError as error:
            return str(error) or type(error).__name__
        return ""

    def bandwidth(self, address: str, port: int, seconds: float) -> float:
        """Bytes per second to there over one connection."""
        with socket.create_connection((address, port), timeout=_TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S + seconds)
            began, sent = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # the other end closes once it has everything
            return sent / (time.perf_counter() - began)


def _interfaces() -> dict[str, str]:
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                found.setdefault(name, address.address)
    return found


def _swallow(listener: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        with connection:
            while connection.recv_into(buffer):
                pass
