"""The ways between nodes: who reaches whom, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, field

import ray

from slime.cli.doctor.cluster_checks import meeting_address, slow_ways
from slime.cli.doctor.node_facts import NodeFacts
from slime.cli.doctor.node_tasks import NodeLostError, Scouts
from slime.ray.cpu_nodes import Node

_AGAIN = 2
Way = tuple[str, str]  # from, to: addresses as Ray has them


@dataclass(kw_only=True)
class Links:
    failures: dict[Way, str] = field(default_factory=dict)  # '' where it can be reached
    rates: dict[Way, float] = field(default_factory=dict)  # bytes per second


def survey(scouts: Scouts, facts: list[NodeFacts], *, seconds: float) -> Links:
    """Each node to all others, and its bandwidth to the next; ways of nodes lost meanwhile are left out."""
    links, doors = Links(), _listen(scouts, facts)
    nodes = scouts.nodes
    for node, following in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True):
        for other in nodes:
            if other is not node:
                _reach(scouts, node, other.address, doors, links)
        way = (node.address, following.address)
        if links.failures.get(way) == "":
            _measure(scouts, node, way, doors, links, seconds)
    for _ in range(_AGAIN):  # other work of a node slows one measurement, and seldom three
        for node in nodes:
            for way in [way for way in slow_ways(links.rates) if way[0] == node.address]:
                _measure(scouts, node, way, doors, links, seconds)
    scouts.ask_all("hang_up")
    lost = set(scouts.lost)
    return Links(
        failures={way: why for way, why in links.failures.items() if not lost & set(way)},
        rates={way: rate for way, rate in links.rates.items() if not lost & set(way)},
    )


def _listen(scouts: Scouts, facts: list[NodeFacts]) -> dict[str, tuple[str, int] | str]:
    """By node where it listens, or why it cannot."""
    meeting = {one.address: meeting_address(one) for one in facts}
    doors: dict[str, tuple[str, int] | str] = {}
    for node in scouts.nodes:
        place = meeting[node.address]
        try:
            doors[node.address] = (place, scouts.ask(node, "listen", place))
        except ray.exceptions.RayTaskError as error:
            doors[node.address] = f"cannot listen at {place}: {error.cause}"
        except NodeLostError:
            continue
    return doors


def _reach(
    scouts: Scouts, node: Node, there: str, doors: dict[str, tuple[str, int] | str], links: Links
) -> None:
    door = doors.get(there, "lost")
    try:
        why = door if isinstance(door, str) else scouts.ask(node, "reach", *door)
    except NodeLostError:
        return
    links.failures[node.address, there] = why


def _measure(
    scouts: Scouts,
    node: Node,
    way: Way,
    doors: dict[str, tuple[str, int] | str],
    links: Links,
    seconds: float,
) -> None:
    try:
        rate = scouts.ask(node, "bandwidth", *doors[way[1]], seconds)
        links.rates[way] = max(rate, links.rates.get(way, 0.0))
    except ray.exceptions.RayTaskError as error:  # the connection broke under load
        links.failures[way] = str(error.cause)
    except NodeLostError:
        return
