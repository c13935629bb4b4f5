"""`slime doctor --cluster`: check every node of a running Ray cluster before a job uses it.

One `NodeProbe` actor runs on each node. A node that is lost while the checks run is reported;
all other nodes are still checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.cli.doctor import cluster_checks as checks
from slime.cli.doctor.cluster_checks import (
    INTERFACE_VARIABLES,
    Finding,
    Link,
    Links,
    NodeFacts,
    NodeProbe,
)
from slime.config.env import child_env, read_env
from slime.core.errors import UserError
from slime.ray.cluster import join
from slime.ray.placement_group import Node, alive_nodes
from slime.ray.watch import cause_line

P = ParamSpec("P")
T = TypeVar("T")

_CLOCK_READS = 5
_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 60.0
# Ray lists a restarted node twice until it notices that the old one is dead.
_DUPLICATE_TIMEOUT_S = 5.0
_BANDWIDTH_RETRIES = 2


class NodeLostError(Exception):
    """The probe of a node no longer answers."""


def examine_cluster(
    address: str | None, folder: str | None, *, seconds: float = 1.0
) -> list[Finding]:
    """Run all checks; each link is loaded for `seconds` to measure its bandwidth."""
    # Ray prints messages about dead nodes to stdout, where they would break the JSON output.
    with redirect_stdout(sys.stderr):
        address = address or read_env().ray_address
        if not address:
            raise UserError("which cluster? Give --address HOST:6379, or set RAY_ADDRESS")
        join(address, logging_level="error")
        try:
            return _examine(folder, seconds)
        finally:
            ray.shutdown()


def _examine(folder: str | None, seconds: float) -> list[Finding]:
    here = ray.get_runtime_context().get_node_id()
    # The variables that a job started here would pass on to its processes.
    environment = child_env()
    given = {name: environment[name] for name in INTERFACE_VARIABLES if name in environment}
    probes = Probes(alive_nodes(first=here), given)
    facts = probes.start()
    if not facts:
        raise UserError("no node of the cluster answers: look at `ray status` and `ray logs`")
    findings = checks.check_versions(facts)
    if clocks := _clock_offsets(probes):
        findings.append(checks.check_clocks(clocks))
    if free := _free_gpus(probes):
        findings.append(checks.check_gpus([f for f in facts if f.address in free], free))
    if folder is not None:
        findings.append(_check_folder(probes, folder))
    findings += checks.check_interfaces(facts)
    if len(facts) > 1:
        links = measure_links(probes, facts, seconds=seconds)
        findings += [checks.check_reach(links.failures)] if links.failures else []
        findings += [checks.check_bandwidth(links.rates)] if links.rates else []
    return [_check_nodes(probes), *findings]  # last, when all lost nodes are known


class Probes:
    """A `NodeProbe` on every node; `environment` holds variables that they get."""

    def __init__(self, nodes: list[Node], environment: dict[str, str]):
        probe = ray.remote(NodeProbe)
        self._probes: dict[Node, Any] = {
            node: probe.options(**_options(node, environment)).remote() for node in nodes
        }
        self.lost: dict[str, str] = {}  # address -> reason

    @property
    def nodes(self) -> list[Node]:
        """The nodes that have answered so far."""
        return list(self._probes)

    def start(self) -> list[NodeFacts]:
        """Return the facts of every node that answers."""
        calls = {probe.facts.remote(): node for node, probe in self._probes.items()}
        facts: dict[Node, NodeFacts] = {}
        errors: dict[Node, str] = {}
        for reference in _completed(calls):
            try:
                facts[calls[reference]] = ray.get(reference)
            except RayError as error:
                errors[calls[reference]] = cause_line(error)[:200]
        alive = {node.address for node in facts}
        for node in set(self._probes) - set(facts):
            del self._probes[node]
            if node.address not in alive:
                timeout = f"does not answer within {_START_TIMEOUT_S:.0f} s"
                self.lost[node.address] = errors.get(node, timeout)
        return [facts[node] for node in self._probes]

    def call(
        self,
        node: Node,
        method: Callable[Concatenate[NodeProbe, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a method of the node's probe; raise NodeLostError, or RayTaskError if it raised."""
        if node not in self._probes:
            raise NodeLostError(node.address)
        try:
            reference = getattr(self._probes[node], method.__name__).remote(*args, **kwargs)
            return ray.get(reference, timeout=_CALL_TIMEOUT_S)
        except RayTaskError:
            raise
        except RayError as error:
            reason = cause_line(error)[:200]
            if isinstance(error, GetTimeoutError):
                reason = f"did not answer `{method.__name__}` within {_CALL_TIMEOUT_S:.0f} s"
            del self._probes[node]
            self.lost[node.address] = reason
            raise NodeLostError(node.address) from error

    def call_all(
        self, method: Callable[Concatenate[NodeProbe, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """Return the results by address, without lost nodes."""
        results = {}
        for node in self.nodes:
            with suppress(NodeLostError):
                results[node.address] = self.call(node, method, *args, **kwargs)
        return results


def measure_links(probes: Probes, facts: list[NodeFacts], *, seconds: float) -> Links:
    """Try every connection, and measure the bandwidth from each node to the next one."""
    links, ports = Links(), _listen(probes, facts)
    nodes = probes.nodes

    def connect(node: Node, other: str) -> None:
        port = ports.get(other, "lost")
        with suppress(NodeLostError):
            why = port if isinstance(port, str) else probes.call(node, NodeProbe.connect, *port)
            links.failures[node.address, other] = why

    def measure(node: Node, link: Link) -> None:
        address, port = ports[link[1]]
        try:
            rate = probes.call(node, NodeProbe.bandwidth, address, int(port), seconds)
            links.rates[link] = max(rate, links.rates.get(link, 0.0))
        except RayTaskError as error:  # the connection broke under load
            links.failures[link] = str(error.cause)
        except NodeLostError:
            pass

    for node, following in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True):
        for other in nodes:
            if other is not node:
                connect(node, other.address)
        link = (node.address, following.address)
        if links.failures.get(link) == "":
            measure(node, link)
    for _ in range(_BANDWIDTH_RETRIES):  # other work on a node may slow down one measurement
        for node in nodes:
            for link in checks.slow_links(links.rates):
                if link[0] == node.address:
                    measure(node, link)
    probes.call_all(NodeProbe.stop_listening)
    return links.without(set(probes.lost))


def _listen(probes: Probes, facts: list[NodeFacts]) -> dict[str, tuple[str, int] | str]:
    """Return the address and port at which each node listens, or why it cannot."""
    bind = {one.address: checks.bind_address(one) for one in facts}
    ports: dict[str, tuple[str, int] | str] = {}
    for node in probes.nodes:
        address = bind[node.address]
        try:
            ports[node.address] = (address, probes.call(node, NodeProbe.listen, address))
        except RayTaskError as error:
            ports[node.address] = f"cannot listen at {address}: {error.cause}"
        except NodeLostError:
            continue
    return ports


def _check_nodes(probes: Probes) -> Finding:
    known = {node["NodeManagerAddress"] for node in ray.nodes()}
    answering = [node.address for node in probes.nodes]
    gone = sorted(known - set(answering) - set(probes.lost))
    lost = {**dict.fromkeys(gone, "is gone"), **probes.lost}
    return checks.check_nodes(answering, lost, head=ray.get_runtime_context().gcs_address)


def _clock_offsets(probes: Probes) -> dict[str, float]:
    """Return how many seconds each node's clock is ahead of this one's, by the fastest reply."""
    offsets = {}
    for node in probes.nodes:
        with suppress(NodeLostError):
            replies = []
            for _ in range(_CLOCK_READS):
                before = time.time()
                there = probes.call(node, NodeProbe.clock)
                after = time.time()
                replies.append((after - before, there - (before + after) / 2))
            offsets[node.address] = min(replies)[1]
    return offsets


def _free_gpus(probes: Probes) -> dict[str, tuple[float, float]]:
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    totals = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
    return {
        node.address: (available.get(node.id, {}).get("GPU", 0), totals[node.id])
        for node in probes.nodes
        if node.id in totals
    }


def _check_folder(probes: Probes, folder: str) -> Finding:
    writer = probes.nodes[0]
    try:
        path, text = probes.call(writer, NodeProbe.write, folder)
    except RayTaskError as error:
        return checks.unwritable_folder(folder, writer.address, str(error.cause))
    except NodeLostError:
        return checks.unwritable_folder(folder, writer.address, "the node was lost")
    read = probes.call_all(NodeProbe.read, path)
    with suppress(NodeLostError):
        probes.call(writer, NodeProbe.remove, path)
    return checks.check_folder(folder, writer.address, text, read)


def _completed(calls: dict[Any, Node]) -> list[Any]:
    """Wait for the calls; once every address has answered, duplicates get a short timeout."""
    deadline, pending, done = time.monotonic() + _START_TIMEOUT_S, list(calls), []
    while pending and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, timeout=1.0)
        done += ready
        answered = {calls[reference].address for reference in done if _succeeded(reference)}
        if answered == {node.address for node in calls.values()}:
            deadline = min(deadline, time.monotonic() + _DUPLICATE_TIMEOUT_S)
    return done


def _succeeded(reference: Any) -> bool:
    try:
        ray.get(reference)
    except RayError:
        return False
    return True


def _options(node: Node, environment: dict[str, str]) -> dict[str, Any]:
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    runtime_env = {"runtime_env": {"env_vars": environment}} if environment else {}
    return {"num_cpus": 0, "scheduling_strategy": strategy, **runtime_env}
