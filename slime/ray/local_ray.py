"""Start a private Ray on this machine, with few processes, in its own session.

Its sockets listen on 127.0.0.1 only and require a token generated for it; token, session folder and logs are in
a folder that no other user can enter. Signals to the driver's process group do not reach it, and its
processes end with the driver (ray_processes.py).

A Python process that imports Ray costs half a second of a core. Ray would start three of them to serve a
cluster of many users, and one more for each actor with its own environment variables.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import _raylet
from ray._private import node, ray_constants, services, utils

from slime.config.env import looks_secret, replace_env, set_env
from slime.core.errors import UserError
from slime.diagnosis.ray_processes import Keeper, PrivateFolder, RayProcess
from slime.utils.machine import available_memory

_RAYLET: Any = _raylet  # its stubs do not declare authentication
_MIN_VERSION = (2, 52)
_LOOPBACK = "127.0.0.1"
_MAX_OBJECT_STORE_BYTES = 2 * 1024**3
_MIN_OBJECT_STORE_BYTES = 128 * 1024**2
# Workers started concurrently; Ray's default is num_cpus, which is 1 here.
_WORKERS_AT_ONCE = 16
_CONNECT_EVERY_MS = 50  # between Ray's processes; Ray's default: every second, 10 times
_CONNECT_TRIES = 200
# Read at the import of a library or later, so the actor can set them itself.
_SET_BY_ACTOR = {
    "GOMP_SPINCOUNT",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "SLIME_ENGINE_TOKEN",
    "SLIME_RM_TOKEN",
    "SLIME_SEVERAL_NODES",
    "TOKENIZERS_PARALLELISM",
    "TQDM_DISABLE",
}

_address: str | None = None  # of its head
_own: _LocalRay | None = None


class _LocalRay:
    """The folder, keeper and environment of this run's Ray, restored by `close`."""

    def __init__(self) -> None:
        self.folder = PrivateFolder()
        self.keeper = Keeper(self.folder.path)
        self._before = replace_env(
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": None,  # would take precedence over the file
                "RAY_AUTH_TOKEN_PATH": str(self.folder.token_path),
            }
        )
        _read_authentication_again()

    def close(self) -> None:
        """Wait until Ray's processes have ended and its folder is removed."""
        self.keeper.close()
        self.folder.close()
        replace_env(self._before)
        _read_authentication_again()


def start() -> None:
    """Start Ray and connect to it. It ends with `stop`, or within seconds after this process."""
    global _address, _own
    check_version(ray.__version__)
    _own = own = _LocalRay()
    try:
        with _only_needed(own.keeper):
            ray.init(
                address="local",
                num_cpus=1,  # CPU slots are processes, not cores: see placement_group.py
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_object_store_bytes(),
                _temp_dir=str(own.folder.ray_path),
                _system_config={
                    "prestart_worker_first_driver": False,  # idle workers would only slow the start
                    "worker_maximum_startup_concurrency": _WORKERS_AT_ONCE,
                    "raylet_client_connect_timeout_milliseconds": _CONNECT_EVERY_MS,
                    "raylet_client_num_connect_attempts": _CONNECT_TRIES,
                },
            )
        _check_private()
    except Exception as error:  # Ray raises a bare Exception if its processes do not come up
        logs = own.folder.keep_logs()
        ray.shutdown()
        own.close()
        _own = None
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"Ray could not be started here: {error} It writes to {logs.parent} (TMPDIR) and to /dev/shm: "
            f"both must be writable and have free space; its logs are in {logs}"
        ) from error
    _address = ray.get_runtime_context().gcs_address


def stop() -> None:
    """Stop Ray; afterwards none of its processes and files are left.

    With its GCS or raylet dead, a shutdown would block for a minute: the keeper kills the rest after this
    process.
    """
    global _address, _own
    if dead_process() is not None:
        return
    ray.shutdown()
    if _own is not None:
        _own.close()
    _address = _own = None


def processes() -> list[RayProcess]:
    """Return the GCS and the raylet of this run's own Ray; none of a cluster that was joined."""
    return _own.keeper.processes if _own is not None else []


def dead_process() -> RayProcess | None:
    """Return the GCS or the raylet of this run's own Ray if it has died."""
    return next((process for process in processes() if not process.running()), None)


def leave_at_exit(first: Callable[[], None]) -> None:
    """Exit with status 1 without Ray's own exit handler, which would wait for the lost process.

    `first` is called before.
    """
    atexit.register(_leave, first)


def _leave(first: Callable[[], None]) -> None:
    first()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def check_version(installed: str) -> None:
    """Refuse a version of Ray that lets anybody who can reach its ports run code."""
    release = tuple(int(part) for part in installed.split(".")[:2])
    if release < _MIN_VERSION:
        raise UserError(
            f"Ray {installed} has no token authentication: anybody who reaches its ports could run code as "
            'you. Install a newer one: pip install -U "ray[default]>=2.52"'
        )


def take_variables(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split an actor's variables into those that Ray sets by runtime_env and those the actor can `adopt` itself.

    Ray writes every runtime_env to a log that other users can read, so variables that look secret are
    always arguments of the actor. In this run's own Ray all variables are, unless one of them must be set
    before the process starts (LD_PRELOAD): that saves one process per actor.
    """
    runtime_env = options.get("runtime_env", {})
    variables = runtime_env.get("env_vars", {})
    if _uses_own_ray() and variables.keys() <= _SET_BY_ACTOR | set(filter(looks_secret, variables)):
        adopted = variables
    else:
        adopted = {name: value for name, value in variables.items() if looks_secret(name)}
    remaining = {name: value for name, value in variables.items() if name not in adopted}
    options = {name: value for name, value in options.items() if name != "runtime_env"}
    if remaining or runtime_env.keys() - {"env_vars"}:
        options["runtime_env"] = {**runtime_env, "env_vars": remaining}
    return options, adopted


def adopt(variables: dict[str, str]) -> None:
    """Set the variables in the actor, before it imports anything that reads them."""
    set_env(**variables)
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]


def _uses_own_ray() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().gcs_address == _address


@contextmanager
def _only_needed(keeper: Keeper) -> Iterator[None]:
    """Patch Ray, where it has no option, while its head starts in this context.

    Do not start the autoscaler, the log monitor of `log_to_driver`, the dashboard's server (which
    gathers statistics even with `include_dashboard=False`) and the HTTP part of the dashboard's agent. Sockets
    listen on loopback, as Ray's do on macOS. Processes lead sessions of their own.
    """
    with ExitStack() as undo:
        for owner, name, replacement in (
            (node.Node, "start_monitor", _nothing),
            (node.Node, "start_log_monitor", _nothing),
            (node.Node, "start_api_server", _register_no_dashboard),
            (utils, "get_dashboard_dependency_error", lambda: ImportError("not wanted")),
            (ray_constants, "ENABLE_RAY_CLUSTER", False),
            (services, "ConsolePopen", _in_own_session(keeper)),
        ):
            if name in vars(owner):  # other versions of Ray may not have it
                undo.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, replacement)
        yield


def _in_own_session(keeper: Keeper) -> type:
    """Return a Popen for Ray's processes: signals to the driver's process group do not reach them."""

    class Popen(services.ConsolePopen):
        def __init__(self, command: list[str], **options: Any):
            super().__init__(command, start_new_session=True, **options)
            keeper.add(Path(command[0]).name, self.pid)

    return Popen


def _read_authentication_again() -> None:
    """Make Ray's C++ side read RAY_AUTH_* again, which it caches at first use."""
    _RAYLET.Config.initialize("")
    _RAYLET.AuthenticationTokenLoader.instance().reset_cache()


def _check_private() -> None:
    """Refuse to continue if this version of Ray ignored the patches."""
    mode = _RAYLET.get_authentication_mode()
    address = ray.util.get_node_ip_address()
    if mode != _RAYLET.AuthenticationMode.TOKEN or address != _LOOPBACK:
        raise UserError(
            f"Ray {ray.__version__} could not be kept private: its address is {address}, its "
            f"authentication mode {mode}. Please report this, and use an older release of Ray"
        )


def _nothing(head: node.Node) -> None:
    pass


def _register_no_dashboard(head: node.Node, **kwargs: Any) -> None:
    """Store that there is no dashboard: otherwise the agent searches for it and logs an error every second."""
    key = ray_constants.DASHBOARD_ADDRESS.encode()
    space = ray_constants.KV_NAMESPACE_DASHBOARD
    client = head.get_gcs_client()
    assert client is not None
    client.internal_kv_put(key, b"none", True, namespace=space)


def _object_store_bytes() -> int:
    """Return at most 2 GiB and a quarter of memory and of /dev/shm, which weight transfers need too."""
    stats = os.statvfs("/dev/shm")
    available = min(stats.f_bavail * stats.f_frsize, available_memory()) // 4
    return max(_MIN_OBJECT_STORE_BYTES, min(_MAX_OBJECT_STORE_BYTES, available))
