"""A run script from the head to the job's end: what runs where, with which variables, and that it ends."""

import re
import shlex
import signal
import socket
import subprocess

import pytest

from tests.launch.site import ROOT, all_end
from tests.waiting import wait_for

GLM = "scripts/run-glm4.5-355B-A32B.sh"
HEAD = "127.0.0.1"
# as the guide to distributed training has them
NCCL = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_IB_TC": "160",
    "NCCL_PXN_DISABLE": "0",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_NET_GDR_LEVEL": "4",
    "NCCL_IB_RETRY_CNT": "7",
    "NCCL_IB_TIMEOUT": "32",
    "NCCL_IB_QPS_PER_CONNECTION": "8",
    "NCCL_P2P_LEVEL": "NVL",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MIN_CTAS": "4",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "MASTER_ADDR": HEAD,
}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")


@pytest.fixture
def three_nodes(site):
    """GLM-4.5's files, and a hostfile of a head and two workers."""
    site.checkpoint("GLM-4.5-355B-A32B")
    hosts = site.folder / "mpi_hostfile"
    hosts.write_text(f"{HEAD} slots=8\nnode-b slots=8\n\n# spare\nnode-c slots=8\nnode-d slots=8\n")
    return {"MASTER_ADDR": HEAD, "HOSTFILE": str(hosts), "NUM_NODES": "3"}


def test_head_workers_and_job(site, three_nodes):
    status, output = site.run(GLM, "--num-rollout", "7", **three_nodes)
    assert status == 0, output
    head, *workers = site.calls("start")
    assert "--head" in head["words"] and _value(head, "--port") == str(site.ports[0])
    assert _value(head, "--node-ip-address") == HEAD and _value(head, "--num-gpus") == "8"
    assert len(workers) == 2  # as many as the job needs, the hostfile has a spare one
    for worker in workers:
        assert f"--address={HEAD}:{site.ports[0]}" in worker["words"]
        assert _value(worker, "--num-gpus") == "8"
    users = re.findall(r"(\S+@\S+) bash -s", site.text("ssh"))
    assert sorted(users) == sorted(["root@node-b", "root@node-c"] * 2)  # started and ended
    assert f"http://{HEAD}:{site.ports[1]}" in output  # the dashboard


def test_the_job_gets_the_flags_and_the_variables(site, three_nodes):
    _, flags = site.run(GLM, "--num-rollout", "7", DRY_RUN="1", **three_nodes)
    secret = {"SGLANG_API_KEY": "k", "SGLANG_CLIP_MAX_NEW_TOKENS": "8"}
    mine = {"RUNTIME_ENV_VARS": "MINE", "MINE": 'a "b"'}
    site.run(GLM, "--num-rollout", "7", **mine, **secret, **three_nodes)
    (job,) = site.calls("job", "submit")
    words = job["words"]
    command = words[words.index("--") + 1 :]
    assert command[1] == str(ROOT / "train.py")
    assert command[2:] == [word for line in flags.splitlines() for word in shlex.split(line)]
    variables = job["runtime_env"]["env_vars"]
    assert NCCL.items() <= variables.items()
    assert variables["MINE"] == 'a "b"' and variables["SGLANG_CLIP_MAX_NEW_TOKENS"] == "8"
    assert "SGLANG_API_KEY" not in variables  # Ray logs a runtime environment for everybody
    assert variables["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert not set(variables) & {*INTERFACES, "SLIME_HOST_IP"}  # every node has its own


def test_every_node_has_its_network_and_the_token(site, three_nodes):
    site.run(GLM, NCCL_IB_TC="128", GLOO_SOCKET_IFNAME="bond0", **three_nodes)
    token_file = site.folder / "home" / ".ray" / "auth_token"
    token = token_file.read_text()
    assert re.fullmatch("[0-9a-f]{64}", token) and token_file.stat().st_mode & 0o777 == 0o600
    for call in site.calls("start"):
        assert call["env"]["RAY_AUTH_MODE"] == "token"
        assert call["env"]["SLIME_HOST_IP"] == HEAD
        assert [call["env"][name] for name in INTERFACES] == ["bond0", "lo", "lo"]
    workers = [call for call in site.calls("start") if "--head" not in call["words"]]
    assert [call["token"] for call in workers] == [{"text": token, "mode": "0o600"}] * 2
    assert site.calls("job", "submit")[0]["runtime_env"]["env_vars"]["NCCL_IB_TC"] == "128"


def test_the_token_is_on_no_command_line(site, three_nodes):
    _, output = site.run(GLM, **three_nodes)
    token = (site.folder / "home" / ".ray" / "auth_token").read_text()
    assert token in site.text("stream-node-b")  # it went through the connection
    spoken = [output, site.text("ssh"), *(" ".join(call["words"]) for call in site.calls())]
    assert not [text for text in spoken if token in text]
    left = [path for path in site.folder.glob("home-node-b/.ray/*") if token in path.read_text()]
    assert left == []


def test_what_was_started_is_ended_and_nothing_else(site, three_nodes):
    site.run(GLM, **three_nodes)
    started = [call["pid"] for call in site.calls("start")]
    assert len(started) == 3 and all_end(started)
    for path in (ROOT / "scripts").rglob("*"):
        if path.is_file():
            assert not re.search(r"pkill|killall|\$\(pgrep|^\s*ray stop", path.read_text(), re.M), (
                path
            )


def test_the_status_of_the_job_is_the_status_of_the_script(site, three_nodes):
    status, output = site.run(GLM, JOB_STATUS="3", **three_nodes)
    assert status == 3
    assert "what Ray and the workers said is in" in output


def test_a_signal_stops_the_job_before_the_cluster(site, three_nodes):
    process = site.start(GLM, JOB_WAITS="1", **three_nodes)
    wait_for(lambda: site.calls("job", "submit"))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    (stop,) = site.calls("job", "stop")
    submitted = site.calls("job", "submit")[0]["words"]
    assert stop["words"][-1] == submitted[submitted.index("--submission-id") + 1]
    started = [call["pid"] for call in site.calls("start")]
    assert len(started) == 3 and all_end(started)


def test_a_cluster_that_runs_already_is_left_alone(site):
    site.checkpoint("Qwen3-4B")
    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        address = f"http://127.0.0.1:{dashboard.getsockname()[1]}"
        status, output = site.run("scripts/run-qwen3-4B.sh", RAY_ADDRESS=address, HEAD_START_S="60")
    assert status == 0, output
    assert site.calls("start") == []
    assert f"--address={address}" in site.calls("job", "submit")[0]["words"]


def test_one_node_needs_neither_hostfile_nor_address(site):
    site.checkpoint("Qwen3-4B")
    status, output = site.run("scripts/run-qwen3-4B.sh")
    assert status == 0, output
    (head,) = site.calls("start")
    assert f"--dashboard-host={HEAD}" in head["words"]  # nobody else needs it


def test_workers_that_join_by_hand(site, three_nodes):
    settings = {**three_nodes, "NUM_NODES": "2", "HOSTFILE": "", "JOIN_BY_HAND": "1"}
    process = site.start(GLM, **settings)
    wait_for(lambda: site.calls("list", "nodes"))
    assert site.calls("job", "submit") == []
    address = f"--address={HEAD}:{site.ports[0]}"
    worker = subprocess.Popen([site.commands / "ray", "start", address], env=site.env())
    output, _ = process.communicate(timeout=240)
    worker.terminate()
    worker.wait()
    assert process.returncode == 0, output
    assert "auth_token && export RAY_AUTH_MODE=token" in output  # what to type there
    assert f"ray start {address} --num-gpus 8" in output
    assert not (site.folder / "ssh").exists()


def test_workers_that_do_not_come(site, three_nodes):
    settings = {**three_nodes, "NUM_NODES": "2", "JOIN_BY_HAND": "1", "JOIN_TIMEOUT_S": "1"}
    status, output = site.run(GLM, **settings)
    assert status == 2 and "only 1 of 2 nodes joined within 1 s" in output
    assert site.calls("job", "submit") == []


def _value(call: dict, option: str) -> str:
    return call["words"][call["words"].index(option) + 1]
