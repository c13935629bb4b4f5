"""`slime doctor --cluster`: findings from made-up facts, and links measured by fake probes."""

from collections.abc import Callable
from dataclasses import replace

from slime.cli.doctor import cluster_checks as checks
from slime.cli.doctor.cluster import NodeLostError, measure_links
from slime.cli.doctor.cluster_checks import NodeFacts
from slime.ray.placement_group import Node

NODE = NodeFacts(
    address="10.0.0.1",
    versions={"torch": "2.13", "driver": "570"},
    gpus=8,
    busy_gpus=0,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"},
    wanted={},
)


def nodes(**changed):
    return [
        replace(NODE, address=f"10.0.0.{i + 1}", **(changed if i == 2 else {})) for i in range(3)
    ]


def test_the_version_most_nodes_have_is_what_to_install():
    torch, driver = checks.check_versions(nodes(versions={"torch": "2.12", "driver": "570"}))
    assert torch.status == "differs" and torch.advice == "install torch 2.13 on 10.0.0.3"
    assert driver.status == "ok"


def test_a_clock_that_is_off_is_named():
    assert checks.check_clocks({"a": 0.2, "b": -0.3}).status == "ok"
    found = checks.check_clocks({"a": 0.0, "b": 0.1, "c": 42.0})
    assert found.status == "differs" and found.found == "off: c by +41.9 s"


def test_taken_and_busy_gpus():
    free = {f"10.0.0.{i}": (8.0, 8.0) for i in (1, 2, 3)}
    assert checks.check_gpus(nodes(), free).status == "ok"
    assert "nvidia-smi on 10.0.0.3" in checks.check_gpus(nodes(busy_gpus=1), free).advice
    taken = checks.check_gpus(nodes(), {**free, "10.0.0.2": (6.0, 8.0)})
    assert taken.status == "fails" and "10.0.0.2" in taken.advice
    assert checks.check_gpus(nodes(gpus=4), free).status == "differs"


def test_what_an_interface_variable_means():
    def chosen(variable, value):
        return checks.matching(variable, replace(NODE, wanted={variable: value}))

    assert chosen("GLOO_SOCKET_IFNAME", "eth") == []
    assert chosen("GLOO_SOCKET_IFNAME", "eth1") == ["eth1"]
    assert chosen("NCCL_SOCKET_IFNAME", "eth") == ["eth0", "eth1"]
    assert chosen("NCCL_SOCKET_IFNAME", "=eth") == []
    assert chosen("NCCL_SOCKET_IFNAME", "^eth0") == ["eth1"]
    assert checks.bind_address(replace(NODE, wanted={"GLOO_SOCKET_IFNAME": "eth1"})) == "10.1.0.1"


def test_a_slow_link_is_named():
    rates = {("a", "b"): 1e9, ("b", "c"): 1e9, ("c", "a"): 1e8}
    found = checks.check_bandwidth(rates)
    assert found.status == "differs" and "c -> a" in found.advice and "a -> b" not in found.advice


ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class FakeProbes:
    """`rates`: by address of the sender, the results of its measurements in order."""

    def __init__(self, rates: dict[str, list[float]], dies_at: tuple[str, str] | None = None):
        self._nodes = {Node(id=a, address=a): a for a in ADDRESSES}
        self.lost: dict[str, str] = {}
        self._rates = {address: list(values) for address, values in rates.items()}
        self._dies_at = dies_at

    @property
    def nodes(self) -> list[Node]:
        return list(self._nodes)

    def call(self, node: Node, function: Callable, *args: object) -> object:
        method = function.__name__
        if (node.address, method) == self._dies_at or node not in self._nodes:
            self._nodes.pop(node, None)
            self.lost[node.address] = "was lost"
            raise NodeLostError(node.address)
        if method == "listen":
            return 4000
        return self._rates[node.address].pop(0) if method == "bandwidth" else ""

    def call_all(self, function: Callable, *args: object) -> dict[str, object]:
        return {node.address: self.call(node, function, *args) for node in self.nodes}


def facts() -> list[NodeFacts]:
    return [
        NodeFacts(address=a, versions={}, gpus=0, busy_gpus=0, interfaces={"eth0": a}, wanted={})
        for a in ADDRESSES
    ]


def test_a_slow_link_is_measured_again():
    first, second, third = ADDRESSES
    probes = FakeProbes({first: [10.0], second: [4.0, 3.0, 8.0], third: [1.0, 2.0, 1.5]})
    links = measure_links(probes, facts(), seconds=1)  # type: ignore[arg-type]
    assert links.rates == {(first, second): 10.0, (second, third): 8.0, (third, first): 2.0}
    assert links.failures == {(a, b): "" for a in ADDRESSES for b in ADDRESSES if a != b}


def test_links_of_a_node_lost_meanwhile_are_left_out():
    first, second, third = ADDRESSES
    probes = FakeProbes({first: [10.0], second: [10.0]}, dies_at=(third, "connect"))
    links = measure_links(probes, facts(), seconds=1)  # type: ignore[arg-type]
    assert links.rates == {(first, second): 10.0}
    assert links.failures == {(first, second): "", (second, first): ""}
