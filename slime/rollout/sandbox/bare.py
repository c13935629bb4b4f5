"""Limits without isolation (`--allow-unsandboxed-code`); imported by the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38


def install_filter(descriptor: int) -> None:
    import ctypes

    code = os.pread(descriptor, 1 << 16, 0)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library; ctypes is imported only where it is needed."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def kill_descendants(child: int) -> None:
    """Kill what runs without isolation. Orphans become children of this process, a subreaper."""
    while True:
        found = [pid for pid in _descendants(os.getpid()) if pid != child or _is_running(child)]
        if not found:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        _reap_others(child)
        time.sleep(0.001)


def _descendants(root: int) -> list:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rsplit(b")", 1)[1].split()
            except (OSError, IndexError):
                continue
            if fields[0] != b"Z" or int(fields[17]) > 1:  # threads: the first may have ended alone
                parents[int(name)] = int(fields[1])
    found, wave = [], [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        found += wave
    return found


def _is_running(child: int) -> bool:
    """Return whether the child is not yet a zombie; its status is collected at the end."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _reap_others(child: int) -> None:
    for pid in _zombies(child):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _zombies(child: int) -> list:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split() if int(pid) != child]
