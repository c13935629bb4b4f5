"""The sbatch template: what srun would run on which nodes, in which container."""

import re
import signal
import subprocess
import time

import pytest

from tests.launch.site import ROOT, all_end

SBATCH, QWEN = "scripts/slurm/slime.sbatch", "scripts/run-qwen3-4B.sh"


@pytest.fixture
def job(site):
    site.checkpoint("Qwen3-4B")
    return {
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SITE_NODES": "node-a node-b node-c",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_GPUS_ON_NODE": "4",
        "MASTER_ADDR": "127.0.0.1",
    }


def steps(site) -> list[tuple[dict[str, str], str]]:
    """Options and command of every srun."""
    found = []
    for line in site.text("srun").splitlines():
        words = line.split()
        options = [word for word in words if word.startswith("--") and words.index(word) < 12]
        command = " ".join(words[words.index("bash") :])
        found.append((dict(o.removeprefix("--").partition("=")[::2] for o in options), command))
    return found


def test_head_on_the_first_node_workers_on_the_others(site, job):
    status, output = site.run(SBATCH, QWEN, "--num-rollout", "7", **job)
    assert status == 0, output
    placed = {command: options["nodelist"] for options, command in steps(site)}
    assert placed == {
        "bash scripts/slurm/node.sh head": "node-a",
        "bash scripts/slurm/node.sh worker": "node-b,node-c",
        f"bash {QWEN} --num-rollout 7": "node-a",
    }
    tasks = {command: (o["nodes"], o["ntasks"]) for o, command in steps(site)}
    assert tasks["bash scripts/slurm/node.sh worker"] == ("2", "2")
    starts = site.calls("start")
    assert len(starts) == 3 and sum("--head" in call["words"] for call in starts) == 1
    for call in starts:
        assert call["words"][call["words"].index("--num-gpus") + 1] == "8"  # RAY_GPUS of the site
        assert call["env"]["NCCL_SOCKET_IFNAME"] == "lo"
    (submitted,) = site.calls("job", "submit")
    assert f"--address=http://127.0.0.1:{site.ports[1]}" in submitted["words"]
    flags = submitted["words"]
    assert flags[flags.index("--actor-num-nodes") + 1] == "3"  # the allocation's
    assert flags[flags.index("--actor-num-gpus-per-node") + 1] == "4"


def test_the_token_is_the_jobs_own_and_on_no_command_line(site, job):
    site.run(SBATCH, QWEN, **job)
    tokens = {call["env"]["RAY_AUTH_TOKEN"] for call in site.calls()}
    (token,) = tokens
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert {call["env"]["RAY_AUTH_MODE"] for call in site.calls()} == {"token"}
    assert token not in site.text("srun")
    assert all(token not in " ".join(call["words"]) for call in site.calls())


def test_container(site, job):
    image = site.folder / "slime.sqsh"
    image.touch()
    site.run(SBATCH, QWEN, IMAGE=str(image), MOUNTS="/shared:/shared", **job)
    for options, _ in steps(site):
        assert options["container-image"] == str(image)
        assert options["container-mounts"] == f"{ROOT}:{ROOT},/shared:/shared"


def test_one_node_has_no_worker_step(site, job):
    status, output = site.run(SBATCH, QWEN, **{**job, "SITE_NODES": "node-a"})
    assert status == 0, output
    assert [command for _, command in steps(site)].count("bash scripts/slurm/node.sh worker") == 0


def test_the_end_of_the_run_ends_every_step(site, job):
    status, _ = site.run(SBATCH, QWEN, JOB_STATUS="5", **job)
    assert status == 5
    started = [call["pid"] for call in site.calls("start")]
    assert len(started) == 3 and all_end(started)


def test_time_is_nearly_over(site, job):
    process = site.start(SBATCH, QWEN, JOB_WAITS="1", **job)
    deadline = time.monotonic() + 120
    while not site.calls("job", "submit"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert len(site.calls("job", "stop")) == 1, output
    assert process.returncode == 143


@pytest.mark.parametrize(
    ("words", "settings", "sentence"),
    [
        ([], {}, "which run? type: sbatch scripts/slurm/slime.sbatch"),
        (["scripts/run-no.sh"], {}, "the run script scripts/run-no.sh does not exist"),
        ([QWEN], {"SLURM_JOB_NODELIST": ""}, "this runs inside a SLURM job"),
        ([QWEN], {"SLURM_SUBMIT_DIR": "/tmp"}, "SLIME_DIR /tmp is no checkout of slime"),
        ([QWEN], {"IMAGE": "/no/image.sqsh"}, "IMAGE /no/image.sqsh does not exist"),
    ],
)
def test_refused(site, job, words, settings, sentence):
    status, output = site.run(SBATCH, *words, **{**job, **settings})
    assert status == 2 and sentence in output and output.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").rglob("*.s[hb]*")), ids=lambda p: p.name)
def test_bash_reads_it(path):
    subprocess.run(["bash", "-n", path], check=True)
