"""An interpreter that seems to have SGLang: says its version, and serves the first few routes.

What it does at its n-th start is the n-th line of the file STAND_IN_PLAN names: "serve", "port taken",
"crash" or "silent"; each start appends its arguments to the file beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml


def write_stand_in(folder: Path, plan: list[str]) -> dict[str, str]:
    """Environment variables under which slime starts it."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    python.chmod(0o755)
    (folder / "plan").write_text("\n".join(plan))
    return {"SLIME_SGLANG_PYTHON": str(python), "STAND_IN_PLAN": str(folder / "plan")}


def starts(folder: Path) -> list[list[str]]:
    """The arguments of every start so far."""
    path = folder / "plan.starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(argv: list[str]) -> None:
    if argv[0] == "-c":
        print("0.5.23")
        return
    plan = Path(os.environ["STAND_IN_PLAN"])
    number = _note_start(plan.with_suffix(".starts"), argv)
    what = plan.read_text().splitlines()[number]
    print(f"start {number}: {what}", flush=True)
    if what == "port taken":
        raise SystemExit(
            "[Errno 98] error while attempting to bind on address: address already in use"
        )
    if what == "crash":
        raise SystemExit("ValueError: the GPU is on fire")
    further_node = "--node-rank" in argv and argv[argv.index("--node-rank") + 1] != "0"
    if what == "silent" or further_node:
        time.sleep(600)
    _wait_for_other_nodes(plan.parent, argv)
    config = yaml.safe_load(Path(argv[argv.index("--config") + 1]).read_text())
    flat = {
        "--port": argv[argv.index("--port") + 1],
        "--weight-version": config["weight-version"],
    }
    ThreadingHTTPServer(("127.0.0.1", int(flat["--port"])), _handler(flat)).serve_forever()


def _note_start(log: Path, argv: list[str]) -> int:
    """How many starts there were before; the nodes of an engine start at the same time."""
    with log.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = len(file.readlines())
        file.write(json.dumps(argv) + "\n")
    return number


def _wait_for_other_nodes(folder: Path, argv: list[str]) -> None:
    """SGLang's first node answers once all of them are there."""
    if "--nnodes" in argv:
        nodes, meeting = (argv[argv.index(name) + 1] for name in ("--nnodes", "--dist-init-addr"))
        while sum(meeting in start for start in starts(folder)) < int(nodes):
            time.sleep(0.05)


def _handler(flat: dict[str, str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"weight_version": flat["--weight-version"]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


if __name__ == "__main__":
    main(sys.argv[1:])
