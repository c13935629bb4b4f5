"""The interface that carries the way to the head is found, whatever the machine's others are."""

import subprocess

from tests.launch.site import ROOT

NAMES = "SLIME_HOST_IP NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
# A node with a management network (eth0) and a fast one (ib0).
_IP = """#!/usr/bin/env bash
case "$*" in
    "-o addr show to 10.1.0.2") echo "3: ib0    inet 10.1.0.2/16 brd 10.1.255.255 scope global ib0" ;;
    "-o route get 10.1.0.1") echo "10.1.0.1 dev ib0 src 10.1.0.2 uid 0 \\\\    cache" ;;
    "-o route get 10.7.0.1") echo "10.7.0.1 via 192.168.0.1 dev eth0 src 192.168.0.2 uid 0 \\\\    cache" ;;
    *) exit 2 ;;
esac
"""


def detected(site, head: str, **settings: str) -> str:
    site.command("ip", _IP)
    program = f"source scripts/lib/say.sh; source scripts/lib/network.sh; detect_network {head}"
    program += f'; for name in {NAMES}; do echo "${{!name}}"; done'
    done = subprocess.run(
        ["bash", "-c", program], env=site.env(**settings), cwd=ROOT, capture_output=True, text=True
    )
    return " ".join((done.stdout + done.stderr).split())


def test_on_a_worker_by_the_route(site):
    assert detected(site, "10.1.0.1") == "10.1.0.2 ib0 ib0 ib0"
    assert detected(site, "10.7.0.1") == "192.168.0.2 eth0 eth0 eth0"


def test_on_the_head_by_its_address(site):
    assert detected(site, "10.1.0.2") == "10.1.0.2 ib0 ib0 ib0"


def test_on_one_machine(site):
    assert detected(site, "127.0.0.1") == "127.0.0.1 lo lo lo"


def test_what_is_set_stays(site):
    assert detected(site, "10.1.0.1", GLOO_SOCKET_IFNAME="bond0") == "10.1.0.2 ib0 bond0 ib0"
    assert detected(site, "10.1.0.1", NCCL_SOCKET_IFNAME="x") == "10.1.0.2 x x x"
    chosen = {"SLIME_HOST_IP": "10.9.9.9", "NCCL_SOCKET_IFNAME": "ib1"}
    assert detected(site, "10.250.0.1", **chosen) == "10.9.9.9 ib1 ib1 ib1"


def test_no_route(site):
    assert "has no route to the head at 10.250.0.1: check MASTER_ADDR" in detected(
        site, "10.250.0.1"
    )
