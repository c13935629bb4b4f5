"""Starts one sandbox, watches its limits, and kills everything in it.

`python -I -S -c "import supervisor; ..." JSON ARGV...`, with the standard library alone, one process per
sandbox:

    slime -- control socket --> supervisor --> bwrap --> pid 1 of the sandbox --> ...

When the control socket closes, the supervisor kills the sandbox; when the supervisor dies, bubblewrap and
pid 1 get SIGKILL from the kernel, and with pid 1 the whole PID namespace ends. Without isolation
(`--allow-unsandboxed-code`) the program itself takes the place of bubblewrap, with limits alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time

from meter import Meter

NOT_STARTED = 97  # exit status: the system refused a part of the sandbox
KILLED = 137
_NOBODY = 65534
STAGE = "/sys"  # a folder that every system has and no sandbox shows
_CLONE_NEWUSER, _CLONE_NEWNS = 0x10000000, 0x00020000
_MS_BIND, _MS_REC = 4096, 16384
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 36, 38
_START_S = 20.0


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    control, isolate = settings["control_fd"], settings["isolate"]
    os.set_inheritable(control, False)
    info_reader, info_writer = os.pipe()
    os.set_inheritable(info_writer, True)
    if not isolate:
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        command[1:1] = ["--info-fd", str(info_writer), "--seccomp", str(settings["seccomp_fd"])]
    child = os.fork()
    if child == 0:
        _exec_child(settings, command)
    os.close(info_writer)
    _close_streams(settings)
    meter = None
    if isolate:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            first = _first_process(info_reader)
            meter = Meter(first, settings) if first else None
    limit = _watch(child, control, meter)
    if meter is not None:
        meter.kill()
    else:
        kill_descendants(child)
    status = _exit_status(child)
    _send(control, {"limit": limit})
    os._exit(KILLED if limit else status)


def _exec_child(settings: dict, command: list) -> None:
    """Turn the forked process into bubblewrap, or into the program itself without isolation."""
    try:
        if settings["isolate"] and os.geteuid() == 0:
            _become_nobody(settings["shown"])
        _set_limits(settings)
        if not settings["isolate"]:
            install_filter(settings["seccomp_fd"])
        os.execvp(settings["executable"], command)
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_STARTED)


def _become_nobody(shown: list) -> None:
    """Give up root for an unprivileged id, in a user namespace that maps both.

    bubblewrap as root would map root alone: the program would then own root's files and device nodes,
    and the kernel's limit on processes does not hold for root. The paths to show may be in folders that only
    root can open, so they are bound into a folder that everybody can open.
    """
    reader, writer = os.pipe()
    target = os.getpid()
    helper = os.fork()
    if helper == 0:  # only a process outside may map two ids
        try:
            os.close(writer)
            if not os.read(reader, 1):
                os._exit(1)
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{target}/{name}", "w") as file:
                    file.write(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(reader)
    call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)  # on failure the helper's pipe ends
    os.write(writer, b"x")
    os.close(writer)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError(1, f"the id {_NOBODY} cannot be mapped into a user namespace")
    _stage(shown)
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _stage(shown: list) -> None:
    """Bind each path to STAGE/0, STAGE/1, ... in the mount namespace of this process."""
    call("mount", b"tmpfs", STAGE.encode(), b"tmpfs", 0, b"mode=755")
    for number, path in enumerate(shown):
        place = f"{STAGE}/{number}"
        if os.path.isdir(path):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
        call("mount", os.fsencode(path), place.encode(), None, _MS_BIND | _MS_REC, None)


def _set_limits(settings: dict) -> None:
    """Set the limits that the kernel keeps for each process; the meter adds the sums."""
    memory = resource.RLIMIT_DATA if settings["forks"] else resource.RLIMIT_AS
    limits = {
        memory: settings["memory_bytes"], resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: settings["disk_bytes"], resource.RLIMIT_NOFILE: settings["open_files"],
    }  # fmt: skip
    if settings["cpu_s"] is not None:
        limits[resource.RLIMIT_CPU] = math.ceil(settings["cpu_s"]) + 1  # the meter comes first
    for which, value in limits.items():
        _, most = resource.getrlimit(which)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (value, value))


def _close_streams(settings: dict) -> None:
    """Close the program's streams here, so that their other ends get EOF when the program closes them."""
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for descriptor in settings["close_fds"]:
        os.close(descriptor)


def _first_process(info: int) -> int:
    """Return the process id of the sandbox's pid 1, or 0 if bubblewrap did not get that far."""
    text, deadline = b"", time.monotonic() + _START_S
    while select.select([info], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(info, 4096)
        text += part
        if not part or b"}" in text:
            break
    os.close(info)
    return int(json.loads(text)["child-pid"]) if b"}" in text else 0


def _watch(child: int, control: int, meter: Meter | None) -> str:
    """Wait until the program ends, slime closes the socket, or a limit is exceeded; return the limit."""
    poll = select.poll()
    ended = os.pidfd_open(child)
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    pause_s = 0.02
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * pause_s)}
        if ended in ready:
            return ""
        if control in ready:
            return "killed"
        if meter is not None:
            start = time.monotonic()
            limit = meter.passed_limit()
            if limit:
                return limit
            pause_s = max(0.02, 4 * (time.monotonic() - start))


def _exit_status(child: int) -> int:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _send(control: int, message: dict) -> None:
    with contextlib.suppress(OSError):  # slime has closed its end of the socket
        os.write(control, json.dumps(message).encode())


def install_filter(descriptor: int) -> None:
    """Install the seccomp filter in this process, which runs without isolation."""
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
    """Kill what runs without isolation. Orphans become children of this process, a subreaper.

    A scan of /proc may miss a process whose parent forked it and ended meanwhile. That parent, or an ancestor
    that ended too, was reaped here then, so the scan is repeated until none ran and none was reaped.
    """
    while True:
        ran = _is_running(child)
        found = [pid for pid in _descendants(os.getpid()) if pid != child or _is_running(child)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if not (_reap_others(child) or found or ran):
            return
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


def _reap_others(child: int) -> int:
    """Return how many children other than `child` have ended, whose statuses nobody needs."""
    reaped = 0
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        others = {int(pid) for pid in file.read().split()} - {child}
    for pid in others:
        with contextlib.suppress(ChildProcessError):
            reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
    return reaped
