"""A Ray of this run's own on this machine, with no more processes and imports than the run needs.

A Python process that imports Ray costs half a second of a core. Ray would start three of them that serve a
cluster of many users, and each actor with variables of its own by way of one more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray._private import node, ray_constants, utils

from slime.utils.env import looks_secret, set_env
from slime.utils.machine import available_memory

_OBJECT_STORE_BYTES = 2 * 1024**3
_LEAST_OBJECT_STORE_BYTES = 128 * 1024**2
# Started at once; by default as many as num_cpus, one after another here.
_WORKERS_AT_ONCE = 16
_CONNECT_EVERY_MS = 50  # Ray's processes to each other; by default once a second, 10 times
_CONNECT_TRIES = 200
# Read when a library is imported or later, so a process can set them itself.
_LATE_VARIABLES = {
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "SLIME_ENGINE_TOKEN",
    "SLIME_SEVERAL_NODES",
    "TOKENIZERS_PARALLELISM",
    "TQDM_DISABLE",
}

_address: str | None = None  # of its head


def start() -> None:
    """It ends with `stop`, or half a second after this process."""
    global _address
    with _only_needed():
        ray.init(
            address="local",
            num_cpus=1,  # slots on the CPU are processes, not cores: see placement_group.py
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=_object_store_bytes(),
            _system_config={
                "prestart_worker_first_driver": False,  # idle workers would only slow the start
                "worker_maximum_startup_concurrency": _WORKERS_AT_ONCE,
                "raylet_client_connect_timeout_milliseconds": _CONNECT_EVERY_MS,
                "raylet_client_num_connect_attempts": _CONNECT_TRIES,
            },
        )
    _address = ray.get_runtime_context().gcs_address


def stop() -> None:
    ray.shutdown()


def take_variables(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split an actor's variables: what Ray sets by its runtime_env, and what the actor can `adopt` itself.

    Ray writes every runtime_env to a log that other users can read, so variables that look secret are
    always arguments of the actor. In a Ray of this run's own the others are too, unless one of them must
    be set before the process starts (LD_PRELOAD): that saves one process per actor.
    """
    runtime_env = options.get("runtime_env", {})
    variables = runtime_env.get("env_vars", {})
    if _is_connected() and variables.keys() <= _LATE_VARIABLES | set(
        filter(looks_secret, variables)
    ):
        adopted = variables
    else:
        adopted = {name: value for name, value in variables.items() if looks_secret(name)}
    left = {name: value for name, value in variables.items() if name not in adopted}
    options = {name: value for name, value in options.items() if name != "runtime_env"}
    if left or runtime_env.keys() - {"env_vars"}:
        options["runtime_env"] = {**runtime_env, "env_vars": left}
    return options, adopted


def adopt(variables: dict[str, str]) -> None:
    """In the actor, before it imports anything that reads them."""
    set_env(**variables)
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]


def _is_connected() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().gcs_address == _address


@contextmanager
def _only_needed() -> Iterator[None]:
    """Inside, a head is started without what Ray has no option to leave out: the autoscaler, the reader of
    log files for `log_to_driver`, the server of the dashboard (with `include_dashboard=False` it gathers
    statistics) and the HTTP side of the dashboard's agent."""
    with ExitStack() as undo:
        for owner, name, replacement in (
            (node.Node, "start_monitor", _nothing),
            (node.Node, "start_log_monitor", _nothing),
            (node.Node, "start_api_server", _say_no_dashboard),
            (utils, "get_dashboard_dependency_error", lambda: ImportError("not wanted")),
        ):
            if name in vars(owner):  # a Ray that has it no more starts what it likes
                undo.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, replacement)
        yield


def _nothing(head: node.Node) -> None:
    pass


def _say_no_dashboard(head: node.Node, **kwargs: Any) -> None:
    """Or the agent would look for its address and complain once a second."""
    key = ray_constants.DASHBOARD_ADDRESS.encode()
    space = ray_constants.KV_NAMESPACE_DASHBOARD
    head.get_gcs_client().internal_kv_put(key, b"none", True, namespace=space)


def _object_store_bytes() -> int:
    """At most 2 GiB, and a quarter of /dev/shm, so that weight transfer has room beside it, and of memory."""
    stats = os.statvfs("/dev/shm")
    room = min(stats.f_bavail * stats.f_frsize, available_memory()) // 4
    return max(_LEAST_OBJECT_STORE_BYTES, min(_OBJECT_STORE_BYTES, room))
