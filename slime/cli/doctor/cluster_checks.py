"""The probe that runs on each node, and the findings about all nodes, each with a suggested fix."""

from __future__ import annotations

import platform
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    address: str  # as Ray has it
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
        """Write a file that all other nodes read; return its path and its contents."""
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


_MAX_CLOCK_SPREAD_S = 1.0  # more makes timestamps of logs and files incomparable
_SLOW = 0.5  # of the fastest link

Link = tuple[str, str]  # from, to: addresses as Ray has them


@dataclass(kw_only=True, frozen=True)
class Finding:
    name: str
    status: Literal["ok", "differs", "fails"]
    found: str
    advice: str = ""


@dataclass(kw_only=True)
class Links:
    failures: dict[Link, str] = field(default_factory=dict)  # '' if the connection works
    rates: dict[Link, float] = field(default_factory=dict)  # bytes per second

    def without(self, lost: set[str]) -> Links:
        """Return the links between nodes that are not lost."""
        return Links(
            failures={link: why for link, why in self.failures.items() if not lost & set(link)},
            rates={link: rate for link, rate in self.rates.items() if not lost & set(link)},
        )


def check_nodes(answering: list[str], lost: dict[str, str], *, head: str) -> Finding:
    """`lost`: address -> reason; `head`: the address at which nodes join."""
    found = f"{len(answering)} answer: {', '.join(answering)}"
    if not lost:
        return Finding(name="nodes", status="ok", found=found)
    reasons = "; ".join(f"{address} {why}" for address, why in lost.items())
    advice = f"join them again: ray start --address={head} on {', '.join(lost)}"
    return Finding(name="nodes", status="fails", found=f"{found}; not {reasons}", advice=advice)


def check_versions(nodes: list[NodeFacts]) -> list[Finding]:
    """Return one finding per package: the same version everywhere, or which nodes differ."""
    findings = []
    for name in nodes[0].versions:
        by_version: dict[str, list[str]] = {}
        for node in nodes:
            by_version.setdefault(node.versions[name], []).append(node.address)
        if len(by_version) == 1:
            findings.append(Finding(name=name, status="ok", found=next(iter(by_version))))
            continue
        usual = Counter(node.versions[name] for node in nodes).most_common(1)[0][0]
        others = [a for version, all_ in by_version.items() if version != usual for a in all_]
        found = "; ".join(f"{version} on {', '.join(all_)}" for version, all_ in by_version.items())
        advice = f"install {name} {usual} on {', '.join(others)}"
        if usual == "none":
            advice = f"install {name} on every node, or remove it from {', '.join(others)}"
        findings.append(Finding(name=name, status="differs", found=found, advice=advice))
    return findings


def check_clocks(offsets: dict[str, float]) -> Finding:
    """`offsets`: address -> seconds ahead of this process's clock."""
    spread = max(offsets.values()) - min(offsets.values())
    if spread <= _MAX_CLOCK_SPREAD_S:
        return Finding(name="clocks", status="ok", found=f"within {1000 * spread:.0f} ms")
    middle = sorted(offsets.values())[len(offsets) // 2]
    wrong = [
        f"{a} by {o - middle:+.1f} s"
        for a, o in offsets.items()
        if abs(o - middle) > _MAX_CLOCK_SPREAD_S
    ]
    found = f"off: {', '.join(wrong)}"
    advice = "set them by NTP: timedatectl set-ntp true, or chronyc makestep"
    return Finding(name="clocks", status="differs", found=found, advice=advice)


def check_gpus(nodes: list[NodeFacts], free: dict[str, tuple[float, float]]) -> Finding:
    """`free`: address -> (GPUs that no job has reserved, GPUs that Ray knows)."""
    found = ", ".join(f"{a} {have:g} of {total:g} free" for a, (have, total) in free.items())
    taken = [address for address, (have, total) in free.items() if have < total]
    busy = [node.address for node in nodes if node.busy_gpus]
    wrong = [n.address for n in nodes if n.gpus and n.gpus != free[n.address][1]]
    status, advice = "ok", ""
    if taken:
        status = "fails"
        advice = f"another job holds GPUs of {', '.join(taken)}: `ray job list`, `ray job stop ID`"
    elif busy:
        status = "fails"
        advice = f"processes outside Ray use GPUs: nvidia-smi on {', '.join(busy)} lists them"
    elif wrong:
        status = "differs"
        found += "; actually " + ", ".join(f"{node.address} has {node.gpus}" for node in nodes)
        advice = f"give ray start --num-gpus what the node has, on {', '.join(wrong)}"
    elif len({total for _, total in free.values()}) > 1:
        status = "differs"
        advice = (
            "a layout of equal nodes leaves the surplus unused; --num-gpus-per-node is the least"
        )
    return Finding(name="GPUs", status=status, found=found, advice=advice)


def unwritable_folder(folder: str, address: str, why: str) -> Finding:
    reason = f"cannot be written on {address}: {why}"
    advice = "make it writable for the user that started Ray, or name another folder"
    return Finding(name=f"folder {folder}", status="fails", found=reason, advice=advice)


def check_folder(folder: str, wrote: str, text: str, read: dict[str, str]) -> Finding:
    """`read`: address -> contents there of the file that `wrote` wrote."""
    unread = {address: found for address, found in read.items() if found != text}
    name = f"folder {folder}"
    if not unread:
        return Finding(name=name, status="ok", found=f"written on {wrote}, read on all nodes")
    found = f"written on {wrote}; " + "; ".join(f"{a}: {found}" for a, found in unread.items())
    advice = f"mount the same filesystem there on {', '.join(unread)}, or name a shared folder"
    return Finding(name=name, status="fails", found=found, advice=advice)


def check_interfaces(nodes: list[NodeFacts]) -> list[Finding]:
    """Check that the interfaces named by the variables exist on each node."""
    findings = []
    for name in sorted({name for node in nodes for name in node.wanted}):
        without = [n for n in nodes if name in n.wanted and not matching(name, n)]
        found = ", ".join(sorted({node.wanted.get(name, "not set") for node in nodes}))
        if not without:
            findings.append(Finding(name=name, status="ok", found=found))
            continue
        there = "; ".join(f"{n.address} has {', '.join(sorted(n.interfaces))}" for n in without)
        advice = f"set {name} for those nodes to one they have, or unset it: {there}"
        found += f": no such interface on {', '.join(n.address for n in without)}"
        findings.append(Finding(name=name, status="fails", found=found, advice=advice))
    return findings


def matching(variable: str, node: NodeFacts) -> list[str]:
    """Return the interfaces that the variable selects: NCCL's takes prefixes, =names, ^exclusions."""
    wanted, names = node.wanted[variable], list(node.interfaces)
    if variable.startswith("GLOO"):
        return [name for name in names if name in wanted.split(",")]
    parts = wanted.lstrip("^=").split(",")
    if wanted.startswith("^"):
        return [name for name in names if not name.startswith(tuple(parts)) and name != "lo"]
    if wanted.startswith("="):
        return [name for name in names if name in parts]
    return [name for name in names if name.startswith(tuple(parts))]


def bind_address(node: NodeFacts) -> str:
    """Return the address of the interface that the node's variables select."""
    for variable in node.wanted:
        for name in matching(variable, node):
            return node.interfaces[name]
    return node.address


def check_reach(failures: dict[Link, str]) -> Finding:
    """`failures`: (from, to) -> why no connection could be opened, '' if it could."""
    bad = {pair: why for pair, why in failures.items() if why}
    if not bad:
        return Finding(name="connections", status="ok", found=f"{len(failures)} ways, all open")
    found = "; ".join(f"{a} does not reach {b}: {why}" for (a, b), why in bad.items())
    return Finding(
        name="connections",
        status="fails",
        found=found,
        advice="open the firewall between the nodes for all ports, or name an interface they share "
        "with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )


def check_bandwidth(rates: dict[Link, float]) -> Finding:
    """`rates`: (from, to) -> bytes per second."""
    words = [f"{a} -> {b} {rate * 8 / 1e9:.1f} Gbit/s" for (a, b), rate in rates.items()]
    slow = [f"{a} -> {b}" for a, b in slow_links(rates)]
    if slow:
        advice = f"check cables, link speed (ethtool) and other traffic of {', '.join(slow)}"
        return Finding(name="bandwidth", status="differs", found=", ".join(words), advice=advice)
    return Finding(name="bandwidth", status="ok", found=", ".join(words))


def slow_links(rates: dict[Link, float]) -> list[Link]:
    """Return the links that are far slower than the fastest one."""
    best = max(rates.values(), default=0.0)
    return [link for link, rate in rates.items() if rate < _SLOW * best]
