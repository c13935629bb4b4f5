"""The nodes of the cluster in a fixed order, and who sits on which where there is no GPU to count."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from slime.core.errors import ConfigError

if TYPE_CHECKING:
    from slime.ray.placement_group import Layout


@dataclass(kw_only=True, frozen=True)
class Node:
    id: str
    address: str


def alive_nodes(*, first: str) -> list[Node]:
    """By address, the node with the id `first` before all others."""
    nodes = [
        Node(id=node["NodeID"], address=node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda n: (n.id != first, int(ipaddress.ip_address(n.address))))


def node_of_bundle(layout: Layout, nodes: list[Node]) -> list[Node]:
    """The trainer's bundles in equal parts on its nodes, what is left over the other nodes, engine by engine."""
    if len(nodes) < layout.trainer_nodes:
        raise ConfigError(
            f"--actor-num-nodes {layout.trainer_nodes}: the Ray cluster has {len(nodes)}; start Ray on "
            "more of them (ray start --address=...), or lower it"
        )
    trained = len(layout.trainer)
    per_node = trained // layout.trainer_nodes
    others = nodes[layout.trainer_nodes :] or nodes
    rest = layout.num_bundles - trained
    per_engine = len(layout.engines[0]) if layout.engines else 1
    return [nodes[number // per_node] for number in range(trained)] + [
        others[number // per_engine % len(others)] for number in range(rest)
    ]
