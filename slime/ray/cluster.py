"""Connect to Ray, the cluster of this job or one started on this machine; collect logs of its nodes."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.config.arguments import Args
from slime.config.env import read_env
from slime.core.errors import UserError
from slime.diagnosis.run_monitor import RunFacts
from slime.ray import local_ray
from slime.utils.untrusted_files import write_private

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0
_MAX_LOG_BYTES = 16 * 1024**2  # only the end of a longer log is copied
_LOGS_TIMEOUT_S = 30.0  # an unreachable node must not keep the run from ending
# A gRPC client starts with this preface.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def connect(notify: Callable[[str], None] = lambda text: None) -> bool:
    """Join a cluster, or start one; return whether this process started one and must stop it.

    `notify` gets the address of the dashboard of a cluster that was joined.
    """
    if ray.is_initialized():
        return False
    redirect_ray_messages()
    if read_env().ray_address:
        context = join(read_env().ray_address or "auto", logging_level=logging.WARNING)
        if context.dashboard_url:
            notify(f"Ray dashboard: http://{context.dashboard_url}")
        return False
    local_ray.start()
    return True


def join(address: str, *, logging_level: Any) -> Any:
    """Return Ray's context of a running cluster; raise UserError with the reason if it cannot be joined."""
    try:
        _probe_head(address)  # Ray itself would retry for a minute
        return ray.init(address=address, log_to_driver=False, logging_level=logging_level)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        hint = f"Run `ray status --address {address}` on its head; a cluster with a token requires "
        hint += "it here too (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)"
        if address.startswith("http"):
            hint = "This is the dashboard's address: give the head's, HOST:6379"
        raise UserError(f"no Ray cluster at {address}: {line}. {hint}") from error


def _probe_head(address: str) -> None:
    """Raise OSError if no Ray head listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and "/" not in host):
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S) as head:
        head.sendall(_HTTP2)
        with suppress(TimeoutError):  # a busy head
            reply = head.recv(5)  # gRPC answers with a frame, whose first byte is 0
            if reply.decode("latin-1").isprintable():
                raise OSError("no Ray head answers there, perhaps its dashboard: the head has 6379")


def redirect_ray_messages() -> None:
    """Write Ray's messages about dead workers and nodes to the log instead of the terminal.

    In the terminal they would precede the error that names the dead process.
    """
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = _log_message


def _log_message(data: dict[str, Any], **options: Any) -> None:
    text = "Ray: " + "\n".join(data["lines"])
    record = logging.LogRecord(__name__, logging.INFO, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def run_facts(args: Args) -> RunFacts:
    """Return what the monitor needs to explain the end of this driver."""
    return RunFacts(
        pid=os.getpid(),
        host=ray.util.get_node_ip_address(),
        head=ray.get_runtime_context().gcs_address,
        raylet=raylet_socket(),
        own_ray=local_ray.processes(),
        save=args.save,
        load=args.load,
        ckpt_step=args.ckpt_step,
        start_rollout_id=args.start_rollout_id,
    )


def raylet_socket() -> str:
    """Return the path of the socket at which this node's raylet listens."""
    node = worker._global_node
    assert node is not None, "Ray is connected"
    return node.raylet_socket_name


def actor_env(processes: int, *, token: str, several_nodes: bool) -> dict[str, str]:
    """Return the environment of an actor: threads, keys, importable hooks."""
    threads = read_env().omp_num_threads or max(1, (os.cpu_count() or 1) // max(1, processes))
    paths = [os.getcwd(), *sys.path[:1], read_env().python_path]
    return {
        "OMP_NUM_THREADS": str(threads),
        # OpenMP's threads spin for 1.5 ms instead of 15: a few times faster on busy cores.
        "GOMP_SPINCOUNT": "30000",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",  # progress is shown by the live display
        "SLIME_ENGINE_TOKEN": token,
        "SLIME_RM_TOKEN": read_env().rm_token or "",
        "SLIME_SEVERAL_NODES": "1" if several_nodes else "0",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in paths if p)),
    }


def beside_driver() -> NodeAffinitySchedulingStrategy:
    """Return the strategy that puts an actor on the node of this process."""
    node = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=False)


def collect_logs(there: Path, here: Path) -> list[str]:
    """Copy logs in the folder `there` of other nodes that are missing in `here` on this one.

    Return the names of copied files; with a shared filesystem there are none. A file that cannot be
    written, such as on a full disk, is left out with a warning: the run itself has ended.
    """
    known = [path.name for path in here.iterdir()]
    mine = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != mine]
    references = [_read_others.options(**_on(node)).remote(str(there), known) for node in others]
    copied: list[str] = []
    if not references:
        return copied
    for done in ray.wait(references, num_returns=len(references), timeout=_LOGS_TIMEOUT_S)[0]:
        with suppress(RayError):  # the node was lost in the meantime
            for name, content in ray.get(done).items():
                if name in copied:  # nodes may share a filesystem that this one lacks
                    continue
                try:
                    # For this user alone: engines log their settings, including keys.
                    write_private(here / name, content)
                    copied.append(name)
                except OSError as error:
                    logger.warning("the log of another node is not copied: %s", error)
    return sorted(copied)


def _on(node: str) -> dict[str, object]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


@ray.remote(max_retries=0)
def _read_others(folder: str, known: list[str]) -> dict[str, bytes]:
    """Return the ends of this node's log files that are not known."""
    paths = [path for path in Path(folder).glob("*.log") if path.name not in known]
    return {path.name: _end_of(path) for path in paths}


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
        return file.read()
