"""The status of a process: its phases, stacks and collectives, readable on its node even while it hangs.

    with in_phase("train"):                    on any thread; phases nest
        ...
    serve_status()                             once per process; a separate thread answers
    query_status(pid)                          from another process of the same user

A process that waits inside a C++ collective answers, because the wait releases the GIL. For a process that
holds the GIL, the stack comes from a signal handler that needs no GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slime.utils.machine import memory_file

logger = logging.getLogger(__name__)

_FRAMES = 12  # innermost ones of a stack
_SIGNAL = signal.SIGUSR1
_THREAD = "status-server"
_DUMP = "slime-stack"  # an anonymous file that the signal handler writes to
_DUMPED_LINES = 40
_DUMP_S = 3.0
_MAX_REPLY = 4 * 1024**2  # bytes
_REPLY_S = 5.0
_phases: dict[int, list[tuple[str, float]]] = {}  # by thread: name, since when


@dataclass(kw_only=True, frozen=True)
class GroupCount:
    """How many collectives this process has begun in one process group."""

    name: str
    ranks: list[int]
    count: int


@dataclass(kw_only=True, frozen=True)
class BusyThread:
    """One thread inside a phase: `phases` [["train", 31.5], ["train/steps", 30.9]] with seconds in each."""

    phases: list[tuple[str, float]]
    stack: list[str]  # outermost first


@dataclass(kw_only=True, frozen=True)
class ProcessStatus:
    """A snapshot of one process."""

    pid: int
    work: list[BusyThread] = field(default_factory=list)
    groups: list[GroupCount] = field(default_factory=list)


@contextlib.contextmanager
def in_phase(name: str) -> Iterator[None]:
    phases = _phases.setdefault(threading.get_ident(), [])
    phases.append((name, time.monotonic()))
    try:
        yield
    finally:
        phases.pop()


def snapshot() -> ProcessStatus:
    """Return the status of this process."""
    frames, now = sys._current_frames(), time.monotonic()
    work = [
        BusyThread(
            phases=[(name, round(now - since, 1)) for name, since in phases],
            stack=_stack_lines(frames[thread]),
        )
        for thread, phases in [(thread, list(phases)) for thread, phases in list(_phases.items())]
        if phases and thread in frames
    ]
    return ProcessStatus(pid=os.getpid(), work=work, groups=_groups())


def serve_status() -> None:
    """Start the thread that answers queries; a second call does nothing.

    Another user may have taken the name of the socket. The process then continues without one: its
    stack can still be read by the signal.
    """
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        return
    faulthandler.register(_SIGNAL, file=memory_file(_DUMP), all_threads=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(os.getpid()))
    except OSError as error:
        logger.warning("no status socket for this process: %s", error)
        listener.close()
        return
    listener.listen(4)
    threading.Thread(target=_serve, args=(listener,), name=_THREAD, daemon=True).start()


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_REPLY_S)  # a client that does not read must not block others
            if _peer_user(connection) == os.getuid():
                connection.sendall(json.dumps(asdict(snapshot())).encode())


def query_status(pid: int, timeout_s: float = 5.0) -> ProcessStatus | str:
    """Return the status of a process on this node, or a sentence with the reason why it is unknown."""
    state = process_state(pid)
    if state in ("", "Z"):
        return "has ended"
    if state in ("T", "t"):
        return f"is stopped (kill -CONT {pid} continues it)"
    try:
        return _parse(_request(pid, timeout_s))
    except (OSError, ValueError):
        dumped = _dumped_stack(pid)
        return "does not answer" + (
            f"; its stack, innermost call first:\n{dumped}" if dumped else ""
        )


def process_state(pid: int) -> str:
    """Return the kernel's state letter: R running, S sleeping, D waiting for a device, T stopped; '' if gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _request(pid: int, timeout_s: float) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(_address(pid))
        if _peer_user(connection) != os.getuid():
            raise OSError(f"the status socket of pid {pid} belongs to another user")
        deadline, reply = time.monotonic() + timeout_s, bytearray()
        while part := connection.recv(65536):
            reply += part
            if len(reply) > _MAX_REPLY or time.monotonic() > deadline:
                raise OSError(f"the status of pid {pid} is too long or takes too long")
        return reply.decode()


def _parse(text: str) -> ProcessStatus:
    facts = json.loads(text)
    return ProcessStatus(
        pid=facts["pid"],
        work=[
            BusyThread(phases=[(name, s) for name, s in thread["phases"]], stack=thread["stack"])
            for thread in facts["work"]
        ],
        groups=[GroupCount(**group) for group in facts["groups"]],
    )


def _dumped_stack(pid: int) -> str:
    """Return the stack written by the signal handler; a process without the handler is not signalled."""
    try:
        files = [f for f in Path(f"/proc/{pid}/fd").iterdir() if _DUMP in os.readlink(f)]
        if not files:
            return ""
        before = len(files[0].read_text())
        os.kill(pid, _SIGNAL)
        return "\n".join(_grown(files[0], before).splitlines()[:_DUMPED_LINES])
    except OSError:
        return ""


def _grown(file: Path, before: int) -> str:
    """Return what was appended after `before` characters, once the file has stopped growing."""
    deadline, text = time.monotonic() + _DUMP_S, ""
    while time.monotonic() < deadline:
        time.sleep(0.2)
        last, text = text, file.read_text()[before:]
        if text and text == last:
            break
    return text


def _stack_lines(frame: object) -> list[str]:
    stack = traceback.extract_stack(frame)[-_FRAMES:]  # type: ignore[arg-type]
    return [f"{f.filename}:{f.lineno} in {f.name}: {f.line or ''}".rstrip(": ") for f in stack]


def _groups() -> list[GroupCount]:
    """Return the collective counts of torch.distributed, if this process uses it."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    world = dist.distributed_c10d._world
    found = []
    for group, name in list(world.pg_names.items()):
        with contextlib.suppress(RuntimeError):  # a backend without sequence numbers
            count = group._get_sequence_number_for_group()
            ranks = sorted(world.pg_group_ranks.get(group, {}))
            found.append(GroupCount(name=str(name), ranks=ranks, count=count))
    return found


def _address(pid: int) -> str:
    """Return the socket's name in the abstract namespace, which leaves no file behind."""
    return f"\0slime-status-{pid}"


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[1]
