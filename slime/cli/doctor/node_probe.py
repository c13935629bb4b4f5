"""What `slime doctor --cluster` runs on each node: versions, GPUs, interfaces, disk and network."""

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
    versions: dict[str, str]  # name -> version, "none" if it is not installed
    gpus: int
    busy_gpus: int  # with memory in use
    interfaces: dict[str, str]  # name -> IPv4 address
    wanted: dict[str, str]  # GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME if they are set


class NodeProbe:
    """A Ray actor on one node while the cluster is checked."""

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
        """Write a file for the other nodes to read; return its path and its contents."""
        path, text = Path(folder) / f".slime-doctor-{secrets.token_hex(8)}", secrets.token_hex(8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path), text

    def read(self, path: str) -> str:
        """Return the contents of the file as seen on this node, or the error of reading it."""
        try:
            return Path(path).read_text()
        except OSError as error:
            return f"{type(error).__name__}: {error.strerror}"

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    # ---- network

    def listen(self, address: str) -> int:
        """Accept and discard data at a free port of `address` until `stop_listening`."""
        self._listener = socket.create_server((address, 0))
        threading.Thread(target=_discard, args=(self._listener,), daemon=True).start()
        return self._listener.getsockname()[1]

    def stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def connect(self, address: str, port: int) -> str:
        """Return '' if a connection can be opened, else why not."""
        try:
            socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
        except OSError as error:
            return str(error) or type(error).__name__
        return ""

    def bandwidth(self, address: str, port: int, seconds: float) -> float:
        """Return the bytes per second sent over one connection."""
        with socket.create_connection((address, port), timeout=_TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S + seconds)
            started, sent = time.perf_counter(), 0
            while time.perf_counter() - started < seconds:
                connection.sendall(_CHUNK)
                sent += len(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # returns when the peer has read everything and closes
            return sent / (time.perf_counter() - started)


def _interfaces() -> dict[str, str]:
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                found.setdefault(name, address.address)
    return found


def _discard(listener: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener was closed
            return
        with connection:
            while connection.recv_into(buffer):
                pass
