"""One scout on every node of a cluster; a node that is lost while it is asked is named and left out."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.cli.doctor.node_facts import NodeFacts
from slime.ray.cpu_nodes import Node
from slime.ray.remote import Remote

_START_S = 120.0
_ANSWER_S = 60.0
# Ray knows a node that was started again twice, until it has missed the old one.
_DOUBLE_S = 5.0


class NodeLostError(Exception):
    """The scout of a node does not answer any more."""


class Scouts:
    """`environment`: variables the scouts get."""

    def __init__(self, nodes: list[Node], environment: dict[str, str]):
        self._scouts = {
            node: Remote(_options(node, environment), "slime.cli.doctor.node_facts.Scout")
            for node in nodes
        }
        self.lost: dict[str, str] = {}  # why, by address

    @property
    def nodes(self) -> list[Node]:
        """Those that have answered so far."""
        return list(self._scouts)

    def start(self) -> list[NodeFacts]:
        """What every node that answers says of itself."""
        calls = {scout.call("facts"): node for node, scout in self._scouts.items()}
        facts: dict[Node, NodeFacts] = {}
        why: dict[Node, str] = {}
        for reference in _in_time(calls):
            node = calls[reference]
            try:
                facts[node] = ray.get(reference)
            except ray.exceptions.RayError as error:
                why[node] = first_line(error)
        there = {node.address for node in facts}
        for node in set(self._scouts) - set(facts):
            reason = why.get(node, f"does not answer within {_START_S:.0f} s")
            self._leave_out(node, reason, lost=node.address not in there)
        return [facts[node] for node in self._scouts]

    def ask(self, node: Node, method: str, *args: Any) -> Any:
        """Raises NodeLostError, or what the scout itself raised inside Ray's RayTaskError."""
        if node not in self._scouts:
            raise NodeLostError(node.address)
        try:
            return self._scouts[node].get(method, *args, timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.GetTimeoutError as error:
            self._leave_out(node, f"did not answer `{method}` within {_ANSWER_S:.0f} s")
            raise NodeLostError(node.address) from error
        except ray.exceptions.RayError as error:
            self._leave_out(node, first_line(error))
            raise NodeLostError(node.address) from error

    def ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Answers by address, of those that give one."""
        said = {}
        for node in self.nodes:
            try:
                said[node.address] = self.ask(node, method, *args)
            except NodeLostError:
                continue
        return said

    def _leave_out(self, node: Node, reason: str, *, lost: bool = True) -> None:
        del self._scouts[node]
        if lost:
            self.lost[node.address] = reason


def first_line(error: BaseException) -> str:
    """Of Ray's long text the line that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "node" in line.lower() or "died" in line.lower()]
    return (telling or lines or [type(error).__name__])[0][:200]


def _in_time(calls: dict[Any, Node]) -> list[Any]:
    """References that are done; a second one of an address is not waited for long."""
    deadline, pending, done = time.monotonic() + _START_S, list(calls), []
    while pending and time.monotonic() < deadline:
        came, pending = ray.wait(pending, timeout=1.0)
        done += came
        answered = {calls[reference].address for reference in done if _worked(reference)}
        if answered == {node.address for node in calls.values()}:
            deadline = min(deadline, time.monotonic() + _DOUBLE_S)
    return done


def _worked(reference: Any) -> bool:
    try:
        ray.get(reference)
    except ray.exceptions.RayError:
        return False
    return True


def _options(node: Node, environment: dict[str, str]) -> dict[str, Any]:
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    runtime_env = {"runtime_env": {"env_vars": environment}} if environment else {}
    return {"num_cpus": 0, "scheduling_strategy": strategy, **runtime_env}
