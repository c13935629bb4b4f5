"""The nodes of the cluster in a fixed order, and the node of each bundle where no GPU limits a node."""

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
    """Return the nodes sorted by address, the one with the id `first` before all others."""
    nodes = [
        Node(id=node["NodeID"], address=node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda n: (n.id != first, int(ipaddress.ip_address(n.address))))


def node_of_bundle(layout: Layout, nodes: list[Node]) -> list[Node]:
    """Spread the trainer's bundles evenly over its nodes, and the engines over the other nodes."""
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
