"""Run attacks in a sandbox, as the user of the tests and as an unprivileged one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.sandbox import RunResult

_ROOT = Path(__file__).parents[1]
_MAIN = """
import asyncio, dataclasses, json, os, signal, sys, time
from slime.rollout.sandbox import Allow, Limits, Sandbox, SandboxEnded, run_python, start
given = json.load(sys.stdin)
async def main():
{body}
print(json.dumps(asyncio.run(main()), default=dataclasses.asdict))
"""
# env comes between, because setpriv itself still has root's capabilities when it starts a program
_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "env"]
USERS = pytest.mark.parametrize(
    "user",
    [
        pytest.param("root", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
        "nobody",
    ],
)


def run_as(user: str, code: str, given: object = None, *, timeout: float = 120.0) -> str:
    """Run slime code in another process, as this user, and return what it prints."""
    interpreter, change = [sys.executable], []
    if user == "nobody" and os.geteuid() == 0:
        interpreter, change = [python_of_nobody()], _NOBODY
    done = subprocess.run(
        [*change, *interpreter, "-c", code],
        input=json.dumps(given), capture_output=True, text=True, timeout=timeout, check=False,
        cwd="/tmp", start_new_session=True,
        env={"HOME": "/nonexistent", "PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_of_nobody() -> str:
    """Return an interpreter that every user may run: the one of the tests may lie in root's home."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        works = [*_NOBODY, path, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        if Path(path).exists() and subprocess.run(works, capture_output=True).returncode == 0:
            return path
    pytest.fail("no Python >= 3.10 that an unprivileged user may run: apt-get install python3")


def call_as(user: str, body: str, given: object = None, *, timeout: float = 120.0) -> Any:
    """Run the body of an async function as this user, and return what it returns."""
    code = _MAIN.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    return json.loads(run_as(user, code, given, timeout=timeout).splitlines()[-1])


def attack(user: str, program: str, *, time_limit_s: float = 30.0, **options: Any) -> RunResult:
    """Run a program as `--rm-type code` would, and return how it ended."""
    given = {"program": textwrap.dedent(program), "time_limit_s": time_limit_s, **options}
    return RunResult(**call_as(user, "return await run_python(**given)", given))
