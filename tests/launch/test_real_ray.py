"""The launch scripts with the real Ray: a head, a worker that joins it, a job, and the end of all of it."""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch.site import free_ports
from tests.tiny import make_tiny_checkpoint

SCRIPT = """
set -euo pipefail
source scripts/lib/launch.sh
settings 2 1
launch --dry-run --train-backend fsdp --hf-checkpoint "$MODEL" --prompt-data "$DATA" --num-rollout 1 \\
    --rollout-batch-size 4 --rollout-max-response-len 8 --rm-type random "$@"
"""


@pytest.fixture
def real(site, tmp_path):
    """Two nodes that are one machine: what must differ between them is changed on the way."""
    (site.commands / "ray").unlink()
    folder = tempfile.mkdtemp(prefix="ray")  # socket paths must be short
    ports = [port for port in free_ports(6) if port not in site.ports][:4]
    options = "--dashboard-agent-listen-port={} --dashboard-agent-grpc-port={}"
    changed = f"s/{ports[0]}/{ports[2]}/; s/{ports[1]}/{ports[3]}/"
    ssh = site.commands / "ssh"
    ssh.write_text(ssh.read_text().replace("tee -a", f"sed '/RAY_START_ARGS/ {changed}' | tee -a"))
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nnode-b slots=1\n")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "HOSTFILE": str(tmp_path / "hosts"),
        "RAY_GPUS": "0",
        "RAY_START_ARGS": f"--temp-dir={folder} --num-cpus=1 --object-store-memory=100000000 "
        + options.format(*ports[:2]),
        "MODEL": str(make_tiny_checkpoint(tmp_path / "model")),
        "DATA": str(tmp_path / "prompts.jsonl"),
    }
    shutil.rmtree(folder, ignore_errors=True)


def test_head_worker_job_end(site, real, tmp_path):
    process = site.start(str(tmp_path / "run.sh"), "--lr", "3e-5", **real)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert "starting Ray on node-b" in output
    assert re.search(r"lr +command line +3e-05", output)  # the job's own output
    assert f"Ray dashboard: http://127.0.0.1:{site.ports[1]}" in output
    token = (site.folder / "home" / ".ray" / "auth_token").read_text()
    assert token not in output
    folder = real["RAY_START_ARGS"].split()[0].split("=")[1]
    deadline = time.monotonic() + 60
    while left := _left(folder):  # Ray's processes end a moment after their parent
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _left(folder: str) -> list[str]:
    """Command lines of processes that still use this cluster's folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if folder in words and int(path.parent.name) != os.getpid():
            lines.append(words)
    return lines
