"""Whole runs whose processes begin with torch and transformers imported.

A tiny run is a driver, Ray's workers for trainer, rollout manager and engine, and the engine's server. Each
imports the same libraries for 2 to 6 s of a core, several times what the run then does. Here they are forked
from one process that has imported them, one per process of pytest:

    test   ──▶ client train.py ...            ──asks──▶ server ──forks──▶ driver
    test   ──▶ Python script.py ...           a driver of another kind, with `for_children`
    raylet ──▶ client default_worker.py ...   ──asks──▶ server ──forks──▶ Ray's worker
    worker ──▶ client -m slime.engine.server  ──asks──▶ server ──forks──▶ engine

A client (fork_client.py) stands for its process: signals, exit status and death pass through it, in both
directions, and its files and environment are handed over. What differs from a process that Python started:
parent, session and process group, and what is imported already. A test about any of these must not use this.
Other programs, and processes with a variable that a library may have read at its import, are started by
Python as usual.
"""

from __future__ import annotations

import atexit
import marshal
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests import fork_client

_ROOT = Path(__file__).resolve().parents[1]
_SCRIPTS = ("train.py", "train_async.py", "default_worker.py")
_ENGINE = ["-m", "slime.engine.server"]
# Those of every trainer and engine (slime/ray/cluster.py: actor_env), which libraries read at their import.
_FIXED = {
    "GOMP_SPINCOUNT": "30000",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
# Read when they are needed, or by Ray, which is not imported yet. Any other difference is a reason to start Python.
_FREE = (
    *("SLIME_", "PYTEST_", "PYTHONPATH", "PWD", "RAY_"),
    *("PYTHONBREAKPOINT", "SPT_NOENV"),  # set by Ray for breakpoint() and setproctitle
)
_MAX_FILES = 200


@cache
def client() -> str:
    """Return the path of a client, with a server behind it that ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="slime-fork-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "python"
    source = Path(fork_client.__file__).read_text()
    path.write_text(f"#!{sys.executable} -IS\n{source}\n\nmain({sys.executable!r})\n")
    path.chmod(0o755)
    ours, theirs = socket.socketpair()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(folder)],
            cwd=_ROOT,
            env={**os.environ, **_FIXED, "PYTHONPATH": str(_ROOT)},
            stdin=theirs,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    theirs.close()
    atexit.register(_stop, server, ours)  # called before the folder is removed
    if ours.recv(1) != b"y":
        raise RuntimeError(f"the fork server did not start:\n{(folder / 'log').read_text()}")
    return str(path)


def variables() -> dict[str, str]:
    """Return what a client needs in its environment."""
    return {fork_client.ADDRESS: str(Path(client()).parent / "socket")}


def for_children(root: str) -> dict[str, str]:
    """Return what a driver that Python starts needs in its environment to have its own processes forked."""
    folder = Path(client()).parent
    site = folder / "site"
    if not site.exists():
        site.mkdir()
        (site / "sitecustomize.py").write_text(_PATCH.format(folder=str(folder)))
    return {**variables(), "PYTHONPATH": f"{site}{os.pathsep}{root}"}


_PATCH = """
from pathlib import Path
from tests.fork_server import start_by_client
start_by_client(Path({folder!r}))
"""


def _stop(server: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    server.wait()


# ---- in the server


@dataclass(frozen=True, kw_only=True)
class _Request:
    words: list[str]
    variables: dict[str, str]
    folder: str
    umask: int
    numbers: list[int]  # of the client's files
    files: list[int]  # the same ones here


@dataclass(frozen=True, kw_only=True)
class _Child:
    pid: int
    handle: int  # a pidfd: readable once the process has ended
    client: socket.socket
    note: Path


class _Server:
    def __init__(self, folder: Path):
        self.folder = folder
        self.before = dict(os.environ)
        self.children: list[_Child] = []
        self.owner = socket.socket(fileno=os.dup(0))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(64)

    def serve(self) -> _Request:
        """Fork for clients until the owner is gone; return in a new process only."""
        self.owner.sendall(b"y")
        while True:
            handles = [child.handle for child in self.children]
            clients = [child.client for child in self.children]
            ready = select.select([self.listener, self.owner, *clients, *handles], [], [])[0]
            if self.owner in ready:
                self._end()
            for child in list(self.children):
                if child.handle in ready:
                    self._reap(child)
                elif child.client in ready:
                    _pass_signals(child)
            if self.listener in ready and (request := self._accept()):
                return request

    def _accept(self) -> _Request | None:
        """Grant a request or not; return it in the new process only."""
        connection = self.listener.accept()[0]
        request = _receive(connection)
        if request is None or not self._is_plain(request):
            for number in request.files if request else []:
                os.close(number)
            connection.close()
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._close()
            return request
        for number in request.files:
            os.close(number)
        note = self.folder / str(_peer(connection))
        note.write_text(str(pid))
        child = _Child(pid=pid, handle=os.pidfd_open(pid), client=connection, note=note)
        self.children.append(child)
        with suppress(OSError):
            connection.sendall(b"y")
        return None

    def _is_plain(self, request: _Request) -> bool:
        """Return whether it is a known program, with nothing that imports here have not seen."""
        known = {**os.environ, **self.before, **request.variables}
        odd = [
            name
            for name in known
            if not name.startswith(_FREE)
            and not (name in _FIXED and name not in request.variables)
            and request.variables.get(name) not in (self.before.get(name), os.environ.get(name))
        ]
        words = request.words
        if odd:
            print("not forked:", words[:2], "because of", odd, flush=True)
        return not odd and (words[:2] == _ENGINE or Path((*words, "")[0]).name in _SCRIPTS)

    def _reap(self, child: _Child) -> None:
        self.children.remove(child)
        status = os.waitpid(child.pid, 0)[1]
        child.note.unlink(missing_ok=True)
        with suppress(OSError):
            child.client.sendall(status.to_bytes(4, "big"))
        child.client.close()
        os.close(child.handle)

    def _close(self) -> None:
        """In a new process: a client that this one held too would not be seen to end."""
        for held in (self.listener, self.owner, *(child.client for child in self.children)):
            held.close()
        for child in self.children:
            os.close(child.handle)

    def _end(self) -> None:
        for child in self.children:
            os.kill(child.pid, signal.SIGKILL)
        os._exit(0)


def _receive(connection: socket.socket) -> _Request | None:
    """Return None if the client was killed meanwhile, or has too many files open."""
    head, files, flags, _ = socket.recv_fds(connection, 4, _MAX_FILES)
    with connection.makefile("rb") as stream:
        body = stream.read(int.from_bytes(head, "big"))
    complete = len(head) == 4 and len(body) == int.from_bytes(head, "big")
    if not complete or flags & socket.MSG_CTRUNC:
        for number in files:
            os.close(number)
        return None
    words, variables, folder, umask, numbers = marshal.loads(body)
    return _Request(
        words=words, variables=variables, folder=folder, umask=umask, numbers=numbers, files=files
    )


def _peer(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def _pass_signals(child: _Child) -> None:
    numbers = b""
    with suppress(ConnectionError):
        numbers = child.client.recv(16)
    for number in numbers or [signal.SIGKILL]:  # the end of a client is the end of its process
        os.kill(child.pid, number)


# ---- in a forked process


def _become(request: _Request, server: _Server, libraries: list[str]) -> None:
    """Take over what the client has: files, environment, working folder."""
    os.setsid()
    _take_files(request)
    os.umask(request.umask)
    os.chdir(request.folder)
    for name in server.before:
        os.environ.pop(name, None)
    os.environ.update(request.variables)  # those that imports have set stay
    first = os.getcwd() if request.words[0] == "-m" else str(Path(request.words[0]).parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *paths, *libraries]


def _take_files(request: _Request) -> None:
    above = max([2, *request.numbers, *request.files]) + 1
    moved = [os.dup2(file, above + n) for n, file in enumerate(request.files)]
    for file in request.files:
        os.close(file)
    for file, number in zip(moved, request.numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def start_by_client(folder: Path) -> None:
    """Have this process start Ray's workers and engines by the server too, and find them as its own."""
    import psutil

    start, children, own = (
        subprocess.Popen.__init__,
        psutil.Process.children,
        str(folder / "python"),
    )
    worker = "--python_worker_command="

    def init(self: Any, args: Any, *more: Any, **options: Any) -> None:
        if isinstance(args, list) and args[:3] == [sys.executable, *_ENGINE]:
            args = [own, *args[1:]]
        elif isinstance(args, list):
            python = f"{worker}{sys.executable} "
            args = [
                word.replace(python, f"{worker}{own} ", 1) if isinstance(word, str) else word
                for word in args
            ]
        start(self, args, *more, **options)

    def find(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        """An engine's actor looks for the owner of its port among the processes it has started."""
        found = children(self, recursive)
        with suppress(FileNotFoundError, psutil.Error):
            found.append(psutil.Process(int((folder / str(self.pid)).read_text())))
        return found

    subprocess.Popen.__init__ = init
    psutil.Process.children = find


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(f"{words[1]}.__main__", None)  # runpy would warn that it is imported
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    LIBRARIES = [path for path in sys.path if path not in ("", str(_ROOT))]
    SERVER = _Server(Path(sys.argv[1]))
    from tests import preload_runs

    REQUEST = SERVER.serve()
    # From here on this is a process of a run. It ends as one too: by the end of this file.
    _become(REQUEST, SERVER, LIBRARIES)
    preload_runs.forget_random_state()
    start_by_client(SERVER.folder)
    _run(REQUEST.words)
