"""Copies logs of nodes that do not share the run's folder to the driver's node when the run ends."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LARGEST = 16 * 1024**2  # only the end of a longer file
_TIMEOUT_S = 30.0  # a node that is cut off must not keep the run from ending


def collect_logs(there: Path, here: Path) -> list[str]:
    """Copy logs that other nodes have in the folder `there` and this one lacks in `here`.

    Return the names of copied files; with a shared filesystem none is missing.
    """
    known = [path.name for path in here.iterdir()]
    mine = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != mine]
    asked = [_read_others.options(**_on(node)).remote(str(there), known) for node in others]
    came: list[str] = []
    if not asked:
        return came
    for answer in ray.wait(asked, num_returns=len(asked), timeout=_TIMEOUT_S)[0]:
        with suppress(RayError):  # the node was lost meanwhile
            for name, content in ray.get(answer).items():
                _write_private(here / name, content)
                came.append(name)
    return sorted(came)


def _write_private(path: Path, content: bytes) -> None:
    """Write a new file that only this user can read: engines log their settings, keys among them."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _on(node: str) -> dict[str, object]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


@ray.remote(max_retries=0)
def _read_others(folder: str, known: list[str]) -> dict[str, bytes]:
    """Return the ends of this node's log files that are not known."""
    paths = [path for path in Path(folder).glob("*.log") if path.name not in known]
    return {path.name: _end_of(path) for path in paths}


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LARGEST))
        return file.read()
