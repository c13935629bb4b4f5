"""Where other processes of the run reach this one: loopback while all of them sit on one node."""

from __future__ import annotations

import socket

import psutil

from slime.config.env import read_env, set_default_env

_LOOPBACK = "127.0.0.1"


def own_host() -> str:
    """SLIME_HOST_IP where that is an address of this node, else the one Ray knows the node by."""
    given = read_env().host_ip
    if given and _is_here(given):  # it may have come with the job, from another node
        return given
    if not read_env().several_nodes:
        return _LOOPBACK
    import ray

    return ray.util.get_node_ip_address()


def choose_interface() -> None:
    """Have gloo use the interface of `own_host`: by itself it takes what the host's name stands for,
    which on many machines is loopback. A GLOO_SOCKET_IFNAME of the user's stays."""
    interface = interface_of(own_host()) if read_env().several_nodes else None
    if interface is not None:
        set_default_env(GLOO_SOCKET_IFNAME=interface)


def interface_of(host: str) -> str | None:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


def _is_here(host: str) -> bool:
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True
