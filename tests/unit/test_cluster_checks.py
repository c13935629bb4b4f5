"""What `slime doctor --cluster` makes of facts that one machine cannot show."""

from dataclasses import replace

from slime.cli.doctor import cluster_checks as checks
from slime.cli.doctor.node_facts import NodeFacts

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
    assert (
        checks.meeting_address(replace(NODE, wanted={"GLOO_SOCKET_IFNAME": "eth1"})) == "10.1.0.1"
    )


def test_a_slow_link_is_named():
    rates = {("a", "b"): 1e9, ("b", "c"): 1e9, ("c", "a"): 1e8}
    found = checks.check_bandwidth(rates)
    assert found.status == "differs" and "c -> a" in found.advice and "a -> b" not in found.advice
