"""`slime doctor --cluster`: looks at every node of a running Ray cluster before a job does."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout, suppress

import ray

from slime.cli.doctor import cluster_checks as checks
from slime.cli.doctor.cluster_checks import Finding
from slime.cli.doctor.links import survey
from slime.cli.doctor.node_facts import INTERFACE_VARIABLES, NodeFacts
from slime.cli.doctor.node_tasks import NodeLostError, Scouts
from slime.config.env import child_env, read_env
from slime.core.errors import UserError
from slime.ray.cluster import join
from slime.ray.cpu_nodes import Node, alive_nodes

_CLOCK_TRIES = 5


def examine_cluster(
    address: str | None, folder: str | None, *, seconds: float = 1.0
) -> list[Finding]:
    """Every finding; `seconds`: how long each link is loaded to measure it."""
    # Ray prints there what it hears of a dead node, in the middle of what may be JSON.
    with redirect_stdout(sys.stderr):
        _connect(address)
        try:
            return _Examination(seconds).run(folder)
        finally:
            ray.shutdown()


def _connect(address: str | None) -> None:
    address = address or read_env().ray_address
    if not address:
        raise UserError("which cluster? Give --address HOST:6379, or set RAY_ADDRESS")
    join(address, logging_level="error")


class _Examination:
    """Every question in turn; what a node that is lost meanwhile would have said is left out."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        here = ray.get_runtime_context().get_node_id()
        # What a job started from here would hand to its processes.
        environment = child_env()
        given = {name: environment[name] for name in INTERFACE_VARIABLES if name in environment}
        self._scouts = Scouts(alive_nodes(first=here), given)

    def run(self, folder: str | None) -> list[Finding]:
        facts = self._scouts.start()
        if not facts:
            raise UserError("no node of the cluster answers: look at `ray status` and `ray logs`")
        findings = checks.check_versions(facts)
        if clocks := self._clocks():
            findings.append(checks.check_clocks(clocks))
        if free := self._free_gpus():
            findings.append(checks.check_gpus([f for f in facts if f.address in free], free))
        if folder is not None:
            findings.append(self._check_folder(folder))
        findings += checks.check_interfaces(facts)
        if len(facts) > 1:
            findings += self._check_links(facts)
        return [self._check_nodes(), *findings]  # the last question: who answered until now

    def _check_nodes(self) -> Finding:
        known = {node["NodeManagerAddress"] for node in ray.nodes()}
        answering = [node.address for node in self._scouts.nodes]
        gone = sorted(known - set(answering) - set(self._scouts.lost))
        lost = {**dict.fromkeys(gone, "is gone"), **self._scouts.lost}
        return checks.check_nodes(answering, lost, head=ray.get_runtime_context().gcs_address)

    def _clocks(self) -> dict[str, float]:
        """Seconds ahead of this process's clock, each from its quickest answer."""
        offsets = {}
        for node in self._scouts.nodes:
            with suppress(NodeLostError):
                offsets[node.address] = min(self._clock(node) for _ in range(_CLOCK_TRIES))[1]
        return offsets

    def _clock(self, node: Node) -> tuple[float, float]:
        """Seconds the answer took, and how far ahead the clock there is."""
        before = time.time()
        there = self._scouts.ask(node, "clock")
        after = time.time()
        return after - before, there - (before + after) / 2

    def _free_gpus(self) -> dict[str, tuple[float, float]]:
        available = ray._private.state.available_resources_per_node()
        totals = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
        return {
            node.address: (available.get(node.id, {}).get("GPU", 0), totals[node.id])
            for node in self._scouts.nodes
            if node.id in totals
        }

    def _check_folder(self, folder: str) -> Finding:
        writer = self._scouts.nodes[0]
        try:
            path, text = self._scouts.ask(writer, "write", folder)
        except ray.exceptions.RayTaskError as error:
            return checks.unwritable_folder(folder, writer.address, str(error.cause))
        except NodeLostError:
            return checks.unwritable_folder(folder, writer.address, "the node was lost")
        read = self._scouts.ask_all("read", path)
        with suppress(NodeLostError):
            self._scouts.ask(writer, "remove", path)
        return checks.check_folder(folder, writer.address, text, read)

    def _check_links(self, facts: list[NodeFacts]) -> list[Finding]:
        links = survey(self._scouts, facts, seconds=self._seconds)
        found = [checks.check_reach(links.failures)] if links.failures else []
        return [*found, *([checks.check_bandwidth(links.rates)] if links.rates else [])]
