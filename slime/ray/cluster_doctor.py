"""`slime doctor --cluster`: looks at every node of a running Ray cluster before a job does."""

from __future__ import annotations

import socket
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ray import cluster_checks as checks
from slime.ray.cluster_checks import Finding
from slime.ray.cpu_nodes import Node, alive_nodes
from slime.ray.remote import Remote
from slime.ray.scout import INTERFACE_VARIABLES, NodeFacts
from slime.utils.env import child_env, read_env
from slime.utils.errors import UserError

_KNOCK_S = 10.0
_START_S = 120.0
_ANSWER_S = 60.0
_CLOCK_TRIES = 5


def examine_cluster(
    address: str | None, folder: str | None, *, seconds: float = 1.0
) -> list[Finding]:
    """Every finding; `seconds`: how long each link is loaded to measure it."""
    _connect(address)
    try:
        return _Examination(seconds).run(folder)
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    address = address or read_env().ray_address
    if not address:
        raise UserError("which cluster? Give --address HOST:6379, or set RAY_ADDRESS")
    try:
        _knock(address)  # Ray itself would try for a minute
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"no Ray cluster at {address}: {line}. Look with `ray status --address {address}` on its "
            "head; a cluster with a token wants it here too (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN)"
        ) from error


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


class _Examination:
    """One scout per node, asked in turn."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        here = ray.get_runtime_context().get_node_id()
        self._nodes = alive_nodes(first=here)
        # What a job started from here would hand to its processes.
        environment = child_env()
        given = {name: environment[name] for name in INTERFACE_VARIABLES if name in environment}
        self._scouts = [
            Remote(_options(node, given), "slime.ray.scout.Scout") for node in self._nodes
        ]

    def run(self, folder: str | None) -> list[Finding]:
        facts = self._start()
        if not facts:
            raise UserError("no node of the cluster answers: look at `ray status` and `ray logs`")
        findings = [self._check_nodes(), *checks.check_versions(facts)]
        findings.append(checks.check_clocks(self._clocks()))
        findings.append(checks.check_gpus(facts, self._free_gpus()))
        if folder is not None:
            findings.append(self._check_folder(folder))
        findings += checks.check_interfaces(facts)
        if len(facts) > 1:
            findings += self._check_network(facts)
        return findings

    def _start(self) -> list[NodeFacts]:
        """Facts of the nodes that answer; the others are left out from now on."""
        calls = [scout.call("facts") for scout in self._scouts]
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=_START_S)
        self._silent = [n.address for n, c in zip(self._nodes, calls, strict=True) if c not in done]
        pairs = [
            (n, s) for n, s, c in zip(self._nodes, self._scouts, calls, strict=True) if c in done
        ]
        self._nodes, self._scouts = [n for n, _ in pairs], [s for _, s in pairs]
        return ray.get([call for call in calls if call in done])

    def _check_nodes(self) -> Finding:
        known = {node["NodeManagerAddress"] for node in ray.nodes()}
        dead = sorted(known - {node.address for node in self._nodes} - set(self._silent))
        found = f"{len(self._nodes)} answer: {', '.join(node.address for node in self._nodes)}"
        if self._silent or dead:
            lost = ", ".join([*self._silent, *dead])
            advice = f"join them again: ray start --address={_head()} on {lost}"
            return Finding(
                name="nodes", status="fails", found=f"{found}; not {lost}", advice=advice
            )
        return Finding(name="nodes", status="ok", found=found)

    def _clocks(self) -> dict[str, float]:
        """Seconds ahead of this process's clock, each from its quickest answer."""
        offsets = {}
        for node, scout in zip(self._nodes, self._scouts, strict=True):
            tries = []
            for _ in range(_CLOCK_TRIES):
                before = time.time()
                there = scout.get("clock", timeout=_ANSWER_S)
                after = time.time()
                tries.append((after - before, there - (before + after) / 2))
            offsets[node.address] = min(tries)[1]
        return offsets

    def _free_gpus(self) -> dict[str, tuple[float, float]]:
        available = ray._private.state.available_resources_per_node()
        totals = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
        return {
            node.address: (available.get(node.id, {}).get("GPU", 0), totals[node.id])
            for node in self._nodes
        }

    def _check_folder(self, folder: str) -> Finding:
        try:
            path, text = self._scouts[0].get("write", folder, timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            reason = f"cannot be written on {self._nodes[0].address}: {error.cause}"
            advice = "make it writable for the user that started Ray, or name another folder"
            return Finding(name=f"folder {folder}", status="fails", found=reason, advice=advice)
        read = self._ask_all("read", path)
        self._scouts[0].get("remove", path, timeout=_ANSWER_S)
        return checks.check_folder(folder, self._nodes[0].address, text, read)

    def _check_network(self, facts: list[NodeFacts]) -> list[Finding]:
        places = [(f.address, checks.meeting_address(f)) for f in facts]
        ports = [
            scout.get("listen", meeting, timeout=_ANSWER_S)
            for scout, (_, meeting) in zip(self._scouts, places, strict=True)
        ]
        failures, rates = {}, {}
        for i, (here, _) in enumerate(places):
            for j, (there, meeting) in enumerate(places):
                if i != j:
                    way = (meeting, ports[j])
                    failures[here, there] = self._scouts[i].get("reach", *way, timeout=_ANSWER_S)
            following = (i + 1) % len(places)
            there, meeting = places[following]
            if not failures[here, there]:
                arguments = (meeting, ports[following], self._seconds)
                rates[here, there] = self._scouts[i].get("bandwidth", *arguments, timeout=_ANSWER_S)
        self._ask_all("hang_up")
        return [checks.check_reach(failures), *([checks.check_bandwidth(rates)] if rates else [])]

    def _ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        said = ray.get([scout.call(method, *args) for scout in self._scouts], timeout=_ANSWER_S)
        return {node.address: one for node, one in zip(self._nodes, said, strict=True)}


def _options(node: Node, environment: dict[str, str]) -> dict[str, Any]:
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    runtime_env = {"runtime_env": {"env_vars": environment}} if environment else {}
    return {"num_cpus": 0, "scheduling_strategy": strategy, **runtime_env}


def _head() -> str:
    return ray.get_runtime_context().gcs_address
