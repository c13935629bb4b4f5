"""The address at which other processes of the run reach this one, and free ports at it."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult

import psutil

from slime.config.env import read_env, set_default_env

_LOOPBACK = "127.0.0.1"
_FIRST, _LAST = 20000, 32000  # below the ports that Linux assigns to outgoing connections
_DERIVED_OFFSET = 233  # SGLang's own ports for data-parallel attention start this far from its port
_BLOCK = 10  # and it uses up to this many from a port it is given
_ATTEMPTS = 200
_PORT_IN_USE = re.compile(
    r"address already in use|errno 98|eaddrinuse|port \S+ is (already|not|still)|already in use",
    re.I,
)


def engine_url(address: str) -> str:
    """Normalize an address: 10.0.0.1:30000 and http://10.0.0.1:30000/ become http://10.0.0.1:30000."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def port_of(url: SplitResult) -> int:
    """Return the port of a URL, or the default one of its scheme."""
    return url.port or (443 if url.scheme == "https" else 80)


def own_host() -> str:
    """Return SLIME_HOST_IP if it is an address of this node, else Ray's address of the node.

    While all processes of the run are on one node, this is the loopback address.
    """
    given = read_env().host_ip
    if given and _is_local(given):  # it may come from another node's environment
        return given
    if not read_env().several_nodes:
        return _LOOPBACK
    import ray

    return ray.util.get_node_ip_address()


def choose_interface() -> None:
    """Make gloo use the interface of `own_host`, unless GLOO_SOCKET_IFNAME is set.

    By default it uses the address that the host name resolves to, which on many machines is loopback.
    """
    interface = interface_of(own_host()) if read_env().several_nodes else None
    if interface is not None:
        set_default_env(GLOO_SOCKET_IFNAME=interface)


def interface_of(host: str) -> str | None:
    """Return the network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


@dataclass(kw_only=True, frozen=True)
class Ports:
    server: int  # HTTP
    rendezvous: int  # of the processes of one engine
    bootstrap: int = 0  # at which decode engines find a prefill engine's KV cache


def find_ports(host: str) -> Ports:
    """Return free ports for an SGLang server.

    Another process may bind one before the server does: the start is then repeated.
    """
    server = _find(host, lambda port: [port, *_block(port + _DERIVED_OFFSET)])
    rendezvous = _find(host, _block, apart_from=server)
    bootstrap = _find(host, _block, apart_from=server)
    return Ports(server=server, rendezvous=rendezvous, bootstrap=bootstrap)


def find_port(host: str) -> int:
    return _find(host, lambda port: [port])


def says_port_taken(text: str) -> bool:
    """Return whether the last lines of a server's log say that a port is in use."""
    return _PORT_IN_USE.search(text) is not None


def _block(first: int) -> list[int]:
    return list(range(first, first + _BLOCK))


def _find(host: str, needs: Callable[[int], list[int]], apart_from: int | None = None) -> int:
    for _ in range(_ATTEMPTS):
        port = random.randrange(_FIRST, _LAST)
        near = apart_from is not None and abs(port - apart_from) <= _DERIVED_OFFSET + _BLOCK
        if not near and all(_is_free(host, number) for number in needs(port)):
            return port
    raise OSError(f"no free ports between {_FIRST} and {_LAST} on {host}")


def _is_local(host: str) -> bool:
    return _is_free(host, 0)


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False
