"""A mistake in the settings of a run script costs one clear sentence, and nothing is started."""

import re
import socket

import pytest

GLM, QWEN = "scripts/run-glm4.5-355B-A32B.sh", "scripts/run-qwen3-4B.sh"


def refused(site, *words: str, **settings: str) -> str:
    status, output = site.run(*words, **settings)
    assert status == 2, output
    sentences = [line for line in output.splitlines() if "what Ray and the workers" not in line]
    assert len(sentences) == 1, output
    assert site.calls("job", "submit") == []
    return sentences[0]


@pytest.fixture
def hosts(site):
    site.checkpoint("GLM-4.5-355B-A32B")
    path = site.folder / "hosts"
    path.write_text("127.0.0.1 slots=8\nnode-b slots=8\n")
    return {"MASTER_ADDR": "127.0.0.1", "HOSTFILE": str(path), "NUM_NODES": "2"}


def test_no_head_address(site, hosts):
    sentence = refused(site, GLM, **{**hosts, "MASTER_ADDR": ""})
    assert "MASTER_ADDR is missing" in sentence


def test_head_address_of_another_machine(site, hosts):
    sentence = refused(site, GLM, **{**hosts, "MASTER_ADDR": "203.0.113.7"})
    assert "MASTER_ADDR 203.0.113.7 is no address of this machine" in sentence


def test_hostfile_that_is_not_there(site, hosts):
    assert "HOSTFILE /no/hosts does not exist" in refused(
        site, GLM, **{**hosts, "HOSTFILE": "/no/hosts"}
    )


def test_head_name_that_nobody_knows(site, hosts):
    sentence = refused(site, GLM, **{**hosts, "MASTER_ADDR": "no-such-host.invalid"})
    assert "MASTER_ADDR no-such-host.invalid is a name that" in sentence


def test_a_host_named_twice_counts_once(site, hosts):
    (site.folder / "hosts").write_text("127.0.0.1\nnode-b\nnode-b\n")
    sentence = refused(site, GLM, **{**hosts, "NUM_NODES": "3"})
    assert "names 1 nodes besides the head, this job needs 2" in sentence


def test_a_key_that_ray_would_log(site, hosts):
    sentence = refused(site, GLM, **hosts, RUNTIME_ENV_VARS="MINE WANDB_API_KEY", WANDB_API_KEY="k")
    assert "Ray would write WANDB_API_KEY to logs" in sentence


def test_hostfile_of_an_editor_of_windows(site, hosts):
    """Lines end with CR LF, the last one not at all."""
    (site.folder / "hosts").write_bytes(b"127.0.0.1 slots=8\r\nnode-b\r\nnode-c")
    status, output = site.run(GLM, **{**hosts, "NUM_NODES": "3"})
    assert status == 0, output
    reached = re.findall(r"root@(\S+) bash", site.text("ssh"))  # at once, so in any order
    assert set(reached) == {"node-b", "node-c"}


@pytest.mark.parametrize("name", ["NUM_NODES", "GPUS_PER_NODE", "RAY_PORT", "DASHBOARD_PORT"])
@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5"])
def test_numbers(site, name, value):
    assert f"{name} must be a whole number above 0, not '{value}'" in refused(
        site, QWEN, **{name: value}
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:1", "does not answer"),
        ("10.0.0.1:6379", "not the address of a dashboard"),
    ],
)
def test_address_of_no_dashboard(site, address, words):
    site.checkpoint("Qwen3-4B")
    assert words in refused(site, QWEN, RAY_ADDRESS=address)


def test_too_few_hosts(site, hosts):
    sentence = refused(site, GLM, **{**hosts, "NUM_NODES": "8"})
    assert "names 1 nodes besides the head, this job needs 7" in sentence


def test_host_that_cannot_be_reached(site, hosts):
    (site.folder / "hosts").write_text("127.0.0.1\nunreachable-1\n")
    status, output = site.run(GLM, **hosts)
    sentence = output.splitlines()[-2]
    assert status == 2 and "unreachable-1 of" in sentence and "Connection refused" in sentence
    assert "must work without a password" in sentence
    assert site.calls("job", "submit") == []


def test_host_without_ray(site, hosts):
    """The worker's own PATH has none, nor has the place where the head has its own."""
    gone = site.folder / "gone"
    ssh = site.commands / "ssh"
    ssh.write_text(ssh.read_text().replace("tee -a", f"sed 's#^HOST=.*RAY_FOLDER=.*#&; RAY_FOLDER={gone}; PATH=/usr/sbin:/usr/bin:/bin#' | tee -a"))  # fmt: skip
    status, output = site.run(GLM, **hosts)
    assert status == 2
    assert "Ray did not start on node-b: node-b: the command ray is missing" in output


def test_head_that_a_host_cannot_reach(site, hosts):
    """As behind a firewall: from there, the head's port is closed."""
    ssh = site.commands / "ssh"
    closed = "sed 's/^export RAY_PORT=.*/export RAY_PORT=1/' | tee -a"
    ssh.write_text(ssh.read_text().replace("tee -a", closed))
    status, output = site.run(GLM, **hosts)
    assert status == 2
    assert "node-b: the head at 127.0.0.1:1 does not answer from here: open that port" in output
    assert len(site.calls("start")) == 1  # the head's own


def test_checkpoint_that_is_not_there(site):
    sentence = refused(site, QWEN)
    assert f"--hf-checkpoint {site.folder}/base/Qwen3-4B is not a folder" in sentence
    assert f"BASE_DIR (now {site.folder}/base)" in sentence


def test_checkpoint_that_is_not_converted(site):
    site.checkpoint("Qwen3-4B")
    (site.folder / "base" / "Qwen3-4B_torch_dist").rmdir()
    assert "tools/convert_hf_to_torch_dist.py" in refused(site, QWEN)


def test_data_that_is_not_there(site):
    site.checkpoint("Qwen3-4B")
    (site.folder / "base" / "dapo-math-17k" / "dapo-math-17k.jsonl").unlink()
    assert "--prompt-data" in refused(site, QWEN)


def test_port_that_is_taken(site):
    site.checkpoint("Qwen3-4B")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sentence = refused(site, QWEN, RAY_PORT=port)
    assert f"port {port} of 127.0.0.1 is taken" in sentence and "RAY_ADDRESS=" in sentence


def test_ray_that_does_not_start(site):
    site.checkpoint("Qwen3-4B")
    site.command("ray", "#!/bin/sh\necho 'ValueError: no such thing'; exit 1\n")
    assert "ends with: ValueError: no such thing" in refused(site, QWEN)


def test_example_without_a_model(site):
    sentence = refused(site, "examples/tool_agent/run.sh")
    assert "which model? type: bash examples/tool_agent/run.sh" in sentence
