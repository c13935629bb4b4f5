"""How engines are started, with a stand-in for SGLang that fails as it is told to."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.config.env import child_env
from slime.core.errors import UserError
from slime.ray import local_ray
from slime.ray.cluster import connect
from slime.ray.engine_actor import engine_command
from slime.ray.engine_group import EngineGroup
from slime.serving.servers import ServerProcess, StartError, wait_until_ready
from slime.utils.engine_keys import remember_key
from tests.args import make_args
from tests.stand_in_sglang import starts, write_stand_in


@pytest.fixture(scope="module", autouse=True)
def cluster():
    started = connect()
    yield
    if started:
        local_ray.stop()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start one engine by a plan, and end it again."""
    groups: list[EngineGroup] = []

    def start(plan: list[str], gpus: int = 1, wait: bool = True, **overrides) -> EngineGroup:
        env = write_stand_in(tmp_path, plan)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        args = make_args(
            rollout_engine="sglang",
            run_dir=str(tmp_path / "run"),
            rollout_num_gpus=gpus,
            rollout_num_gpus_per_engine=gpus,
            **overrides,
        )
        env |= {"SLIME_ENGINE_TOKEN": "secret-of-this-run", "PYTHONPATH": os.getcwd()}
        options = {"num_cpus": 0, "runtime_env": {"env_vars": env}}
        group = EngineGroup(args, [[options] * gpus], token="secret-of-this-run")
        groups.append(group)
        group.start()
        if wait:
            group.wait()
        return group

    yield start
    for group in groups:
        group.stop()


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_port_that_is_taken_meanwhile_costs_one_more_try(start, tmp_path):
    group = start(["port taken", "port taken", "serve"])
    ports = [option(argv, "--port") for argv in starts(tmp_path)]
    assert len(set(ports)) == 3
    assert group.infos[0].url == f"http://127.0.0.1:{ports[2]}"
    assert group.infos[0].kind == "sglang" and group.failed() == []
    time.sleep(2)  # a server started by a thread of its actor must outlive the call
    assert group.failed() == []


def test_the_error_of_a_server_that_cannot_start_has_its_last_log_lines(start, tmp_path):
    with pytest.raises(UserError, match="the GPU is on fire") as error:
        start(["crash"])
    assert str(tmp_path / "run" / "logs" / "engine_0.log") in str(error.value)
    assert len(starts(tmp_path)) == 1  # another port would not help


def test_last_log_lines_of_a_server_that_is_not_up(start, tmp_path):
    group = start(["silent"], wait=False)
    deadline = time.monotonic() + 180
    while "start 0: silent" not in group.last_log_lines():
        assert time.monotonic() < deadline, group.last_log_lines()
        time.sleep(0.2)
    assert group.last_log_lines().startswith("engine 0 is not up; its log ends with\n")


def test_a_frozen_actor_does_not_delay_the_start_forever(start):
    group = start(["silent"], wait=False, rollout_health_check_timeout=1)
    deadline = time.monotonic() + 180
    while "start 0: silent" not in group.last_log_lines():
        assert time.monotonic() < deadline, group.last_log_lines()
        time.sleep(0.2)
    place = group.members()[0].remote.place()
    os.kill(place.pid, signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=f"engine 0 hangs: its actor .pid {place.pid} on"):
            group.wait()
    finally:
        os.kill(place.pid, signal.SIGCONT)


def test_the_key_of_the_control_routes_is_on_no_command_line(start, tmp_path):
    start(["serve"])
    [argv] = starts(tmp_path)
    assert "secret-of-this-run" not in " ".join(argv)
    assert option(argv, "--config").endswith("engine_0.yaml")
    assert not list((tmp_path / "run").rglob("*.yaml"))  # read, and removed


def test_what_tells_the_server_from_another_is_on_no_command_line(start, tmp_path):
    """Whoever could read it might take the port first and be sent the key."""
    start(["serve"])
    [argv] = starts(tmp_path)
    assert not [word for word in argv if "weight-version" in word or word.startswith("start-")]


def test_an_engine_over_two_nodes_is_two_processes(start, tmp_path):
    """Each node has one GPU here, so two of them are two nodes."""
    group = start(["serve", "serve"], gpus=2, num_gpus_per_node=1)
    first, second = sorted(starts(tmp_path), key=lambda argv: option(argv, "--node-rank"))
    for rank, argv in enumerate((first, second)):
        assert option(argv, "--nnodes") == "2" and option(argv, "--node-rank") == str(rank)
        assert option(argv, "--tp-size") == "2"
        assert option(argv, "--dist-init-addr") == option(first, "--dist-init-addr")
    assert group.infos[0].device_ids == ("cpu", "cpu")
    logs = tmp_path / "run" / "logs"
    assert {path.name for path in logs.glob("*.log")} == {
        "engine_0_node_0.log",
        "engine_0_node_1.log",
    }
    assert not list(logs.glob("*.yaml"))  # with the key: on neither node


def test_a_server_that_is_killed_is_found_and_replaced(start, tmp_path):
    group = start(["serve", "crash", "serve"])
    pid = json.loads((tmp_path / "run" / "logs" / "engine_0.port").read_text())["pid"]
    os.kill(pid, 9)
    deadline = time.monotonic() + 60
    while group.failed() != [0]:  # a process dies a moment after it is told to
        assert time.monotonic() < deadline
    assert "could not be started again" in group.restart(0)
    assert group.infos == [] and group.failed() == [0]
    assert group.restart(0) == "engine 0 failed and was started again"
    assert group.infos == group.unsynced and group.failed() == []


def test_an_actor_that_dies_while_its_engine_is_started_again_is_replaced_later(start, tmp_path):
    group = start(["serve", "silent", "serve"])
    with ThreadPoolExecutor(1) as pool:
        restart = pool.submit(group.restart, 0)
        while "start 1: silent" not in (tmp_path / "run" / "logs" / "engine_0.log").read_text():
            assert not restart.done(), restart.result()
            time.sleep(0.2)
        place = group.members()[0].remote.place()
        assert place is not None
        os.kill(place.pid, signal.SIGKILL)
        assert "engine 0 failed and could not be started again so far" in restart.result(timeout=60)
    assert group.infos == [] and group.failed() == [0]
    assert group.restart(0) == "engine 0 failed and was started again"


def test_an_actor_that_dies_in_the_first_start_is_replaced(start, tmp_path):
    group, told = start(["silent", "serve"], wait=False), []
    deadline = time.monotonic() + 180
    while "start 0: silent" not in group.last_log_lines():
        assert time.monotonic() < deadline, group.last_log_lines()
        time.sleep(0.2)
    place = group.members()[0].remote.place()
    assert place is not None
    os.kill(place.pid, signal.SIGKILL)
    group.wait(told.append)
    assert [text for text in told if text.startswith("engine 0 died while it started")]
    assert len(group.infos) == 1 and group.failed() == []


def test_a_server_that_says_nothing_does_not_hang_the_run(tmp_path):
    env = write_stand_in(tmp_path, ["silent"])
    log = tmp_path / "log"
    command = [env["SLIME_SGLANG_PYTHON"], "-m", "sglang.launch_server", "--port", "9"]
    process = ServerProcess(command, log, child_env(**env))
    try:
        with pytest.raises(StartError, match="has written nothing for 1 s"):
            wait_until_ready(
                "http://127.0.0.1:9",
                label="x",
                log_path=log,
                ended=process.status,
                owns_port=process.listens_at,
                key=None,
                silent_timeout_s=1,
            )
        with pytest.raises(StartError, match="was not up after 1 s"):
            wait_until_ready(
                "http://127.0.0.1:9",
                label="x",
                log_path=log,
                ended=process.status,
                owns_port=process.listens_at,
                key=None,
                start_timeout_s=1,
            )
    finally:
        process.stop()
    assert process.status() is not None


def test_another_process_at_the_port_gets_no_key(tmp_path):
    """It took the port before our server, knows the label, and waits to be trusted."""
    heard: list[str | None] = []

    class Impostor(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers.get("Authorization"))
            body = b'{"weight_version": "the-label"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Impostor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, log = f"http://127.0.0.1:{server.server_port}", tmp_path / "log"
    process = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], log)
    remember_key([url], "secret")  # of an engine that was here before
    try:
        with pytest.raises(StartError, match="already in use by another server"):
            wait_until_ready(
                url,
                label="the-label",
                log_path=log,
                ended=process.status,
                owns_port=process.listens_at,
                key="secret",
            )
    finally:
        process.stop()
        server.shutdown()
        server.server_close()
    assert heard and set(heard) == {None}


@pytest.mark.parametrize("given", [{}, {"sglang_random_seed": 7}])
def test_no_two_embedded_engines_sample_the_same(given: dict, tmp_path):
    args = make_args(rollout_engine="slime", **given)
    seeds = [
        option(
            engine_command(args, index=index, host="127.0.0.1", port_file=tmp_path), "--random-seed"
        )
        for index in range(2)
    ]
    first = given.get("sglang_random_seed", args.rollout_seed)
    assert seeds == [str(first), str(first + 1)]
