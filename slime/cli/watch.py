"""`slime watch RUN_DIR ...`: a web page for running, finished or dead runs, on this machine only.

`slime train --watch` starts the same server as a separate process, which ends with the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime.config.arguments import Args
from slime.core.errors import ConfigError, UserError

_HOST = "127.0.0.1"


def main(argv: list[str]) -> int:
    options = _parse(argv)
    if options.inherited is not None:
        return _serve_inherited(Path(options.folders[0]), options.inherited)
    folders = [Path(folder) for folder in options.folders]
    for folder in folders:
        _check(folder)
    listener = _listen(options.port)
    key = secrets.token_urlsafe(24)
    print(f"Open {_address(listener, key)}\nCtrl-C ends it; nothing else can reach it.", flush=True)
    return asyncio.run(_serve(folders, listener, key, until_eof=False))


@contextmanager
def watching(args: Args) -> Iterator[None]:
    """With --watch, serve the page of this run until it ends.

    The key goes through the server's stdin, whose EOF tells the server that this process has ended.
    """
    if not args.watch:
        yield
        return
    listener, key = _listen(0), secrets.token_urlsafe(24)
    listener.set_inheritable(True)
    command = [sys.executable, "-m", "slime.cli", "watch", args.run_dir]
    server = subprocess.Popen(
        [*command, "--inherited", str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,  # Ctrl-C is for the run
    )
    assert server.stdin is not None
    with suppress(OSError):
        server.stdin.write(f"{key}\n".encode())
        server.stdin.flush()
    print(f"Watch this run at {_address(listener, key)}", flush=True)
    listener.close()
    try:
        yield
    finally:
        with suppress(OSError):
            server.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=10)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="slime watch",
        description="Serve a web page of runs, on loopback and under an address with a random key.",
    )
    parser.add_argument(
        "folders", nargs="+", metavar="RUN_DIR", help="a run folder, or a folder of run folders"
    )
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--inherited", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _check(folder: Path) -> None:
    from slime.runlog.live.server import has_runs

    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Name the folder of a run, such as runs/first.")
    if not has_runs(folder):
        raise UserError(
            f"{folder} is not the folder of a run, and has none in it: no metrics.jsonl"
        )


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port} cannot be used: {error}") from None


def _address(listener: socket.socket, key: str) -> str:
    return f"http://{_HOST}:{listener.getsockname()[1]}/{key}/"


def _serve_inherited(run_dir: Path, handle: int) -> int:
    key = sys.stdin.readline().strip()
    listener = socket.socket(fileno=handle)
    return asyncio.run(_serve([run_dir], listener, key, until_eof=True)) if key else 1


async def _serve(folders: list[Path], listener: socket.socket, key: str, *, until_eof: bool) -> int:
    from slime.runlog.live.server import WatchServer

    os.nice(5)  # the run comes first
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, done.set)
    server = WatchServer(folders, key)
    await server.start(listener)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), lambda: os.read(0, 1) or done.set())
    await done.wait()
    await server.close()
    return 0
