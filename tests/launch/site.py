"""A make-believe cluster for the launch scripts: `ray`, `ssh`, `srun` and `scontrol` that tell on them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.parallel import worker_number

ROOT = Path(__file__).parents[2]
# Each node has a home of its own; the stream is kept, to see what was sent.
_SSH = """#!/usr/bin/env bash
echo "$*" >>"$SITE/ssh"
host=${@: -3:1}; host=${host#*@}
[[ $host != *unreachable* ]] || { printf "ssh: connect to host $host port 22: Connection refused\\r\\n" >&2; exit 255; }
mkdir -p "$SITE/home-$host"
tee -a "$SITE/stream-$host" | HOME="$SITE/home-$host" exec bash -s
"""
_SRUN = """#!/usr/bin/env bash
echo "$*" >>"$SITE/srun"
while [[ $1 == -* ]]; do
    case $1 in --nodelist=*) nodes=${1#*=} ;; esac
    shift
done
for node in ${nodes//,/ }; do NODE=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}"' TERM
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
    wait "$pid" 2>/dev/null || { late=$?; [[ $late == 127 ]] || status=$late; }
done
exit $status
"""
_SCONTROL = """#!/usr/bin/env bash
[[ $1 $2 == "show hostnames" ]] && tr ' ' '\\n' <<<"$SITE_NODES"
"""


class Site:
    def __init__(self, folder: Path):
        self.folder = folder
        self.commands = folder / "bin"
        self.commands.mkdir()
        (folder / "home").mkdir()
        for name, text in (("ssh", _SSH), ("srun", _SRUN), ("scontrol", _SCONTROL)):
            self.command(name, text.replace("$1 $2", '"$1 $2"'))
        fake = Path(__file__).with_name("fake_ray.py").read_text()
        self.command("ray", f"#!{sys.executable}\n{fake}")
        self.ports = free_ports(2)

    def command(self, name: str, text: str) -> None:
        path = self.commands / name
        path.write_text(text)
        path.chmod(0o755)

    def env(self, **settings: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.commands}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder / "home"),
            "SITE": str(self.folder),
            "CALLS": str(self.folder / "calls"),
            "RAY_PORT": str(self.ports[0]),
            "DASHBOARD_PORT": str(self.ports[1]),
            "RAY_GPUS": "8",
            "SKIP_PLAN": "1",
            "BASE_DIR": str(self.folder / "base"),
            "TMPDIR": str(self.folder),
            **settings,
        }

    def start(self, *words: str, **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", *words],
            env=self.env(**settings),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, **settings: str) -> tuple[int, str]:
        """Exit status and everything printed."""
        process = self.start(*words, **settings)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    def calls(self, *first: str) -> list[dict]:
        """What `ray` was asked, in order, where it begins with these words."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        calls = [json.loads(line) for line in lines if line.endswith("\n")]  # not one half written
        return [call for call in calls if call["words"][: len(first)] == list(first)]

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def checkpoint(self, name: str) -> None:
        """What the run script of a model expects below BASE_DIR."""
        base = self.folder / "base"
        for folder in (name, f"{name}_torch_dist", "dapo-math-17k", "aime-2024"):
            (base / folder).mkdir(parents=True)
        (base / name / "config.json").write_text("{}")
        (base / "dapo-math-17k" / "dapo-math-17k.jsonl").touch()


def free_ports(count: int) -> list[int]:
    """Below those that Linux hands out, so that no connection of anybody takes one before its use.

    Each process of the test suite has a thousand of its own.
    """
    first = 20_000 + 1_000 * (worker_number() % 12)
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(first, first + 1_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found += [port] if port not in found else []
    return found


def all_end(pids: list[int], within_s: float = 30) -> bool:
    """Whether they end, if not at once; one whose status nobody has asked for yet has ended."""
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > deadline:
            return False
        pids = alive
        time.sleep(0.1)
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
