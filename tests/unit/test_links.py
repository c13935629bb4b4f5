"""Ways between nodes, with scouts that are played: who is asked what, and what is made of it."""

from slime.cli.doctor.links import survey
from slime.cli.doctor.node_facts import NodeFacts
from slime.cli.doctor.node_tasks import NodeLostError
from slime.ray.cpu_nodes import Node

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class PlayedScouts:
    """`rates`: by address of the sender what it measures, one after the other."""

    def __init__(self, rates: dict[str, list[float]], dies_at: tuple[str, str] | None = None):
        self._nodes = {Node(id=a, address=a): a for a in ADDRESSES}
        self.lost: dict[str, str] = {}
        self._rates = {address: list(values) for address, values in rates.items()}
        self._dies_at = dies_at

    @property
    def nodes(self) -> list[Node]:
        return list(self._nodes)

    def ask(self, node: Node, method: str, *args: object) -> object:
        if (node.address, method) == self._dies_at or node not in self._nodes:
            self._nodes.pop(node, None)
            self.lost[node.address] = "was lost"
            raise NodeLostError(node.address)
        if method == "listen":
            return 4000
        return self._rates[node.address].pop(0) if method == "bandwidth" else ""

    def ask_all(self, method: str, *args: object) -> dict[str, object]:
        return {node.address: self.ask(node, method, *args) for node in self.nodes}


def facts() -> list[NodeFacts]:
    return [
        NodeFacts(address=a, versions={}, gpus=0, busy_gpus=0, interfaces={"eth0": a}, wanted={})
        for a in ADDRESSES
    ]


def test_a_slow_way_is_measured_again():
    first, second, third = ADDRESSES
    scouts = PlayedScouts({first: [10.0], second: [4.0, 3.0, 8.0], third: [1.0, 2.0, 1.5]})
    links = survey(scouts, facts(), seconds=1)  # type: ignore[arg-type]
    assert links.rates == {(first, second): 10.0, (second, third): 8.0, (third, first): 2.0}
    assert links.failures == {(a, b): "" for a in ADDRESSES for b in ADDRESSES if a != b}


def test_ways_of_a_node_lost_meanwhile_are_left_out():
    first, second, third = ADDRESSES
    scouts = PlayedScouts({first: [10.0], second: [10.0]}, dies_at=(third, "reach"))
    links = survey(scouts, facts(), seconds=1)  # type: ignore[arg-type]
    assert links.rates == {(first, second): 10.0}
    assert links.failures == {(first, second): "", (second, first): ""}
