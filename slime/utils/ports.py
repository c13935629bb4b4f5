"""Free ports. Another process may take one before the server binds it: the start is then repeated."""

from __future__ import annotations

import random
import re
import socket
from dataclasses import dataclass

_FIRST, _LAST = 20000, 32000  # below what Linux hands out to outgoing connections
_DERIVED_OFFSET = 233  # SGLang's own ports for data-parallel attention start this far from its port
_BLOCK = 10  # and it counts up to this many from a port it is given
_TRIES = 200
_TAKEN = re.compile(
    r"address already in use|errno 98|eaddrinuse|port \S+ is (already|not|still)|already in use",
    re.I,
)


@dataclass(kw_only=True, frozen=True)
class Ports:
    server: int  # HTTP
    meeting: int  # where the processes of one engine find each other


def find_ports(host: str) -> Ports:
    server = _find(host, lambda port: [port, *_block(port + _DERIVED_OFFSET)])
    meeting = _find(host, _block, apart_from=server)
    return Ports(server=server, meeting=meeting)


def find_port(host: str) -> int:
    return _find(host, lambda port: [port])


def says_port_taken(text: str) -> bool:
    """Whether a server's last lines complain that a port is in use."""
    return _TAKEN.search(text) is not None


def _block(first: int) -> list[int]:
    return list(range(first, first + _BLOCK))


def _find(host, needs, apart_from: int | None = None) -> int:
    for _ in range(_TRIES):
        port = random.randrange(_FIRST, _LAST)
        near = apart_from is not None and abs(port - apart_from) <= _DERIVED_OFFSET + _BLOCK
        if not near and all(_is_free(host, number) for number in needs(port)):
            return port
    raise OSError(f"no free ports between {_FIRST} and {_LAST} on {host}")


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False
