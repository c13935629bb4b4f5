"""Connects to Ray: the cluster this job was submitted to, or one of its own on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.utils.env import read_env

_OBJECT_STORE_BYTES = 2 * 1024**3


def connect(say: Callable[[str], None] = lambda text: None) -> bool:
    """Join or start a cluster; True when this process started it and must end it.

    `say` is told where the dashboard of a cluster is that was joined.
    """
    if ray.is_initialized():
        return False
    if read_env().ray_address:
        context = ray.init(address="auto", log_to_driver=False, logging_level="warning")
        if context.dashboard_url:
            say(f"Ray dashboard: http://{context.dashboard_url}")
        return False
    ray.init(
        address="local",
        num_cpus=1,  # slots on the CPU are processes, not cores: see placement_group.py
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=_object_store_bytes(),
        _system_config={
            "prestart_worker_first_driver": False
        },  # idle workers would only slow the start
    )
    return True


def actor_env(processes: int, *, token: str, several_nodes: bool) -> dict[str, str]:
    """Environment of an actor: threads, the run's token, importable hooks."""
    threads = read_env().omp_num_threads or max(1, (os.cpu_count() or 1) // max(1, processes))
    paths = [os.getcwd(), *sys.path[:1], read_env().python_path]
    return {
        "OMP_NUM_THREADS": str(threads),
        # OpenMP's threads spin 1.5 ms for each other instead of 15: on busy cores a few times faster.
        "GOMP_SPINCOUNT": "30000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",  # bars of libraries; progress is the display's business
        "SLIME_ENGINE_TOKEN": token,
        "SLIME_SEVERAL_NODES": "1" if several_nodes else "0",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in paths if p)),
    }


def beside_driver() -> NodeAffinitySchedulingStrategy:
    """Puts an actor on the node of this process."""
    node = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _object_store_bytes() -> int:
    """At most 2 GiB and a quarter of /dev/shm, so that weight transfer has room beside it."""
    stats = os.statvfs("/dev/shm")
    return max(128 * 1024**2, min(_OBJECT_STORE_BYTES, stats.f_bavail * stats.f_frsize // 4))
