"""The GLM-4.5 job as its document starts it: the script on node 0, then `ray start` by hand on the workers."""

from __future__ import annotations

import re
import subprocess

from tests.launch.site import ROOT, Site
from tests.seeds.documents import quote
from tests.waiting import wait_for

HEAD = "127.0.0.1"


def test_workers_join_by_hand(tmp_path):
    """Only the variables of the document are set; the token's step is on the screen."""
    site = Site(tmp_path)
    site.checkpoint("GLM-4.5-355B-A32B")
    script = quote("glm45:29").text.removeprefix("cd slime/\nbash ")
    process = site.start(script, MASTER_ADDR=HEAD)
    try:
        wait_for(lambda: site.calls("list", "nodes"))
        assert site.calls("job", "submit") == []
        workers = [_join(site, f"10.0.0.{number}") for number in range(2, 9)]
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    for worker in workers:
        worker.terminate()
        worker.wait()
    assert process.returncode == 0, output
    first, second = re.search(r"waiting for Ray .*:\n +(.*)\n +(.*)\n", output).groups()
    assert first.startswith(f"mkdir -p ~/.ray && scp root@{HEAD}:")
    assert first.endswith("~/.ray/auth_token && export RAY_AUTH_MODE=token")
    assert second.split() == _command(site).split()
    assert len(site.calls("job", "submit")) == 1
    assert not (site.folder / "ssh").exists()


def _command(site: Site) -> str:
    """Return the document's line for a worker, with the port of this test."""
    line = quote("glm45:32").text.replace("\\\n", "")
    return line.replace("${MASTER_ADDR}:6379", f"{HEAD}:{site.ports[0]}")


def _join(site: Site, address: str) -> subprocess.Popen[bytes]:
    command = ["bash", "-c", f"exec {_command(site)}"]
    return subprocess.Popen(command, cwd=ROOT, env=site.env(WORKER_IP=address))
