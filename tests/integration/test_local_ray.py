"""The Ray a run starts for itself: few processes, and actors that have their variables all the same."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from slime.ray import local_ray
from slime.ray.cluster import connect
from slime.ray.remote import Remote
from tests.other_user import NOBODY, as_user, needs_root

_HOOK = """
import importlib
import os
class Seen:
    def variable(self, name):
        at_start = open("/proc/self/environ").read().split("\\0")
        return os.environ.get(name), any(line.startswith(name + "=") for line in at_start)
    def torch_threads(self):
        import torch
        return torch.get_num_threads()
"""


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    assert connect()
    yield
    local_ray.stop()


@pytest.fixture
def ask(tmp_path: Path):
    """An actor whose class only its PYTHONPATH leads to."""
    (tmp_path / "hook_of_a_user.py").write_text(_HOOK)
    actors: list[Remote] = []

    def ask(method: str, *args: object, **variables: str) -> object:
        env = {"PYTHONPATH": str(tmp_path), **variables}
        options = {"num_cpus": 0, "runtime_env": {"env_vars": env}}
        actors.append(Remote(options, lambda: importlib.import_module("hook_of_a_user").Seen))
        return actors[-1].get(lambda seen: getattr(seen, method)(*args), timeout=240)

    yield ask
    for actor in actors:
        actor.kill()


def test_only_what_a_run_needs_is_started():
    words = " ".join(
        word for child in psutil.Process().children(recursive=True) for word in _words(child)
    )
    assert "gcs_server" in words and "raylet" in words
    for script in ("monitor.py", "dashboard/dashboard.py", "log_monitor.py"):
        assert f"/{script}" not in words


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it ended meanwhile
        return []


def test_an_actor_sets_variables_of_libraries_itself(ask):
    assert ask("variable", "SLIME_ENGINE_TOKEN", SLIME_ENGINE_TOKEN="t") == ("t", False)
    other = "2" if os.environ.get("OMP_NUM_THREADS") == "1" else "1"
    assert ask("torch_threads", OMP_NUM_THREADS=other) == _torch_threads(other)


def _torch_threads(variable: str) -> int:
    """Of a process that starts with the variable."""
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return int(subprocess.check_output(command, env={**os.environ, "OMP_NUM_THREADS": variable}))


def test_a_variable_that_must_be_there_at_the_start_is(ask):
    assert ask("variable", "MALLOC_ARENA_MAX", MALLOC_ARENA_MAX="2") == ("2", True)


def test_another_ray_sets_all_variables_but_secrets(monkeypatch):
    variables = {"OMP_NUM_THREADS": "1", "SLIME_ENGINE_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s"}
    options = {"num_cpus": 0, "runtime_env": {"env_vars": variables}}
    assert local_ray.take_variables(options) == ({"num_cpus": 0}, variables)
    monkeypatch.setattr(local_ray, "_address", "192.0.2.1:6379")
    secrets = {"SLIME_ENGINE_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s"}
    left = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    assert local_ray.take_variables(options) == (left, secrets)


def test_secrets_stay_out_of_a_runtime_env_that_is_needed():
    variables = {"LD_PRELOAD": "x.so", "MY_PASSWORD": "p"}
    taken = local_ray.take_variables({"runtime_env": {"env_vars": variables}})
    assert taken == (
        {"runtime_env": {"env_vars": {"LD_PRELOAD": "x.so"}}},
        {"MY_PASSWORD": "p"},
    )


def test_the_object_store_leaves_memory_to_others():
    store = ray.cluster_resources()["object_store_memory"]
    assert store <= max(128 * 2**20, psutil.virtual_memory().total / 4)


def test_paths_come_after_the_folder_of_the_script(monkeypatch):
    monkeypatch.setattr(sys, "path", ["here", "site"])
    monkeypatch.setenv("PYTHONPATH", "")
    local_ray.adopt({"PYTHONPATH": f"/a{os.pathsep}site{os.pathsep}/b"})
    assert sys.path == ["here", "/a", "/b", "site"]


def test_every_socket_listens_on_loopback(ask):
    """The driver's, an actor's, and those of all of Ray's processes."""
    assert ask("torch_threads")  # an actor is there
    ours = psutil.Process()
    listening = {
        connection.laddr.ip
        for process in [ours, *ours.children(recursive=True)]
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}


@needs_root
def test_another_user_reaches_neither_token_nor_sockets():
    own = local_ray._own
    assert own is not None
    socket_path = ray._private.worker._global_node.raylet_socket_name
    for attempt, path in ((_read, own.folder.token_path), (_connect_to, socket_path)):
        with pytest.raises(AssertionError, match="PermissionError"):
            as_user(NOBODY, attempt, str(path))
    assert "auth_token" not in str(own.folder.token_path)  # not the one of all Rays of this user


def _read(path: str) -> str:
    return Path(path).read_text()


def _connect_to(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


@pytest.mark.parametrize("variables", [{"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}])
def test_a_client_without_the_token_is_refused(variables):
    program = (
        "import sys\nfrom ray._raylet import GcsClient\n"
        "print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', timeout=20))"
    )
    address = ray.get_runtime_context().gcs_address
    with_token = _python(program, address, {})
    assert with_token.returncode == 0, with_token.stderr
    refused = _python(program, address, variables)
    assert refused.returncode != 0 and "nauthenticated" in refused.stderr.lower(), refused.stderr


def _python(
    program: str, address: str, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, address],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
