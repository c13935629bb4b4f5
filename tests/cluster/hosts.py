"""Hosts on one machine: network namespaces with an address each, joined by a switch of their own.

       switch namespace          host namespaces (every one has its own loopback, ports and routes)
    ┌───────────────────┐
    │ bridge ── port0 ──┼── eth0  10.77.0.1
    │        ── port1 ──┼── eth0  10.77.0.2
    │        ── port2 ──┼── eth0  10.77.0.3
    └───────────────────┘

Nothing is added to the namespace the tests run in, and names carry this process's id.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass

_NET = "10.77.0"


@dataclass(frozen=True, kw_only=True)
class Host:
    name: str  # of its namespace
    address: str
    port: str  # its plug in the switch

    def command(self, words: list[str]) -> list[str]:
        """The words, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *words]


class Network:
    """A switch with `count` hosts; `close` takes everything away again."""

    def __init__(self, count: int):
        prefix = f"slime{os.getpid()}{uuid.uuid4().hex[:4]}"
        self.switch = f"{prefix}sw"
        self.hosts = [
            Host(name=f"{prefix}h{i}", address=f"{_NET}.{i + 1}", port=f"port{i}")
            for i in range(count)
        ]
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge0", "up")
        for host in self.hosts:
            self._plug_in(host)

    def cut(self, host: Host) -> None:
        """Pull the plug: packets vanish, connections stay open on both ends."""
        _ip("-n", self.switch, "link", "set", host.port, "down")

    def restore(self, host: Host) -> None:
        _ip("-n", self.switch, "link", "set", host.port, "up")

    def close(self) -> None:
        for name in [*(host.name for host in self.hosts), self.switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _plug_in(self, host: Host) -> None:
        _ip("netns", "add", host.name)
        words = ["link", "add", host.port, "netns", self.switch, "type", "veth"]
        _ip(*words, "peer", "name", "eth0", "netns", host.name)
        _ip("-n", self.switch, "link", "set", host.port, "master", "bridge0", "up")
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host.name, "link", "set", device, "up")


def why_not() -> str | None:
    """Why hosts cannot be made on this machine; None where they can."""
    if shutil.which("ip") is None:
        return "the `ip` command is missing (Debian, Ubuntu: apt install iproute2)"
    try:
        Network(1).close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
