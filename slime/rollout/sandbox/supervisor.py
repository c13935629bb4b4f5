"""Starts one sandbox, watches its limits, and kills everything in it: `python supervisor.py JSON ARGV...`

Started by file path with the standard library alone, one process per sandbox:

    slime -- control socket --> supervisor --> bwrap --> pid 1 of the sandbox --> ...

When the control socket closes, the supervisor kills the sandbox; when the supervisor dies, bubblewrap and
pid 1 get SIGKILL from the kernel, and with pid 1 the whole PID namespace ends.
"""

import sys

del sys.path[0]  # this folder; its modules are not top-level ones

import contextlib  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import struct  # noqa: E402
import time  # noqa: E402

NOT_STARTED = 97  # exit status: the system refused a part of the sandbox
KILLED = 137
_NOBODY = 65534
_CLONE_NEWUSER = 0x10000000
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 36, 38
_START_S = 20.0


def main() -> None:
    settings, command = json.loads(sys.argv[1]), sys.argv[2:]
    control, isolate = settings["control_fd"], settings["isolate"]
    os.set_inheritable(control, False)
    info_reader, info_writer = os.pipe()
    os.set_inheritable(info_writer, True)
    if not isolate:
        _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        command[1:1] = ["--info-fd", str(info_writer), "--seccomp", str(settings["seccomp_fd"])]
    child = os.fork()
    if child == 0:
        _become(settings, command)
    os.close(info_writer)
    _leave_streams(settings)
    meter = None
    if isolate:
        first = _first_process(info_reader)
        meter = Meter(first, settings) if first else None
    limit = _watch(child, control, meter)
    _kill_all(child, meter)
    status = _exit_status(child)
    _send(control, {"limit": limit})
    os._exit(KILLED if limit else status)


def _become(settings: dict, command: list) -> None:
    """Turn the forked process into bubblewrap, or into the program itself without isolation."""
    try:
        if settings["isolate"] and os.geteuid() == 0:
            _enter_user_namespace()
        _set_limits(settings)
        if not settings["isolate"]:
            _install_filter(settings["seccomp_fd"])
        os.execvp(settings["executable"], command)
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(NOT_STARTED)


def _enter_user_namespace() -> None:
    """Make a namespace in which root and an unprivileged id are mapped, and none can be nested.

    bubblewrap alone would map root only: the program would then own root's files and device nodes, and
    the kernel's limit on processes does not hold for root.
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
                _write(f"/proc/{target}/{name}", f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(reader)
    _call("unshare", _CLONE_NEWUSER)  # on failure the helper sees the end of its pipe
    os.write(writer, b"x")
    os.close(writer)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError(1, "the ids of the user namespace cannot be mapped")
    _write("/proc/sys/user/max_user_namespaces", "0")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _set_limits(settings: dict) -> None:
    """Set the limits that the kernel keeps for each process; the meter adds the sums."""
    memory = resource.RLIMIT_DATA if settings["forks"] else resource.RLIMIT_AS
    limits = {
        memory: settings["memory_bytes"], resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: settings["disk_bytes"], resource.RLIMIT_NOFILE: settings["open_files"],
    }  # fmt: skip
    if settings["cpu_s"] is not None:
        limits[resource.RLIMIT_CPU] = math.ceil(settings["cpu_s"])
    for which, value in limits.items():
        _, most = resource.getrlimit(which)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (value, value))


def _install_filter(descriptor: int) -> None:
    import ctypes

    code = os.pread(descriptor, 1 << 16, 0)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library; ctypes is imported only where it is needed."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def _leave_streams(settings: dict) -> None:
    """Close the program's streams here, so that their other ends see when the program closes them."""
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


def _watch(child: int, control: int, meter: "Meter | None") -> str:
    """Wait until the program ends, slime lets go of it, or a limit is passed; name that limit."""
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


def _kill_all(child: int, meter: "Meter | None") -> None:
    if meter is not None:
        meter.kill()
    else:
        _kill_descendants(child)


def _kill_descendants(child: int) -> None:
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
            if fields[0] != b"Z":
                parents[int(name)] = int(fields[1])
    found, wave = [], [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        found += wave
    return found


def _is_running(child: int) -> bool:
    """Whether the child is not yet a zombie; its status is collected at the end."""
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


def _exit_status(child: int) -> int:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _send(control: int, message: dict) -> None:
    with contextlib.suppress(OSError):  # slime has let go of the sandbox
        os.write(control, json.dumps(message).encode())


class Meter:
    """Adds up what the processes of a sandbox use, and ends them all at once.

    It reads the sandbox's own /proc and statistics of its tmpfs, both reached through its first process.
    """

    def __init__(self, first: int, settings: dict) -> None:
        self._first = first
        self._pidfd = os.pidfd_open(first)
        self._settings = settings
        self._proc = self._files = -1
        self._cpu_seen: dict = {}  # (pid, start time): CPU seconds of the process itself
        self._tick = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def passed_limit(self) -> str:
        """Return the name of a limit that is passed now, or nothing."""
        if not self._open():
            return ""
        disk = os.fstatvfs(self._files)
        inodes = (disk.f_files - disk.f_ffree) * 1024  # about what the kernel keeps for each
        if inodes > self._settings["disk_bytes"]:
            return "disk"
        pids = [name for name in os.listdir(self._proc) if name.isdigit()]
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize + inodes + self._sockets()
        if self._memory_passes(pids, self._settings["memory_bytes"] - used):
            return "memory"
        most = self._settings["cpu_s"]
        return "cpu" if most is not None and self._cpu_s(pids) > most else ""

    def _open(self) -> bool:
        """Open the sandbox's /proc and /tmp. Until bubblewrap has mounted them, they are the host's."""
        if self._files >= 0:
            return True
        try:
            root = f"/proc/{self._first}/root"
            for path in ("/proc", "/tmp"):
                if os.stat(root + path).st_dev == os.stat(path).st_dev:
                    return False
            self._proc = os.open(root + "/proc", os.O_RDONLY | os.O_DIRECTORY)
            self._files = os.open(root + "/tmp", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        return True

    def _memory_passes(self, pids: list, most: int) -> bool:
        """Compare cheap upper bounds first; the exact figure takes a walk over the page tables."""
        if sum(self._virtual(pid) for pid in pids) <= most:
            return False
        shared = sum(self._shared(pids).values())
        if shared + sum(self._status(pid, b"RssAnon:", b"VmPTE:") for pid in pids) <= most:
            return False
        return shared + sum(self._exact(pid) for pid in pids) > most

    def _virtual(self, pid: str) -> int:
        fields = self._read(f"{pid}/statm").split()
        return int(fields[0]) * self._page if fields else 0

    def _exact(self, pid: str) -> int:
        tables = self._status(pid, b"VmPTE:")
        return tables + _kilobytes(self._read(f"{pid}/smaps_rollup"), (b"Pss_Anon:",))

    def _status(self, pid: str, *names: bytes) -> int:
        return _kilobytes(self._read(f"{pid}/status"), names)

    def _shared(self, pids: list) -> dict:
        """Return the sizes of shared anonymous mappings by inode.

        Their whole size counts, since pages stay allocated when they are no longer in a page table.
        """
        sizes: dict = {}
        for pid in pids:
            for line in self._read(f"{pid}/maps").splitlines():
                if line.endswith(b"/dev/zero (deleted)"):
                    span, _, offset, _, inode = line.split()[:5]
                    start, end = (int(text, 16) for text in span.split(b"-"))
                    size = int(offset, 16) + end - start
                    sizes[inode] = max(size, sizes.get(inode, 0))
        return sizes

    def _sockets(self) -> int:
        """Return the most that the buffers of the sandbox's sockets can hold."""
        first = self._read("1/net/sockstat").split(b"\n", 1)[0].split()
        return int(first[-1]) * (208 << 10) if first else 0

    def _cpu_s(self, pids: list) -> float:
        """Return the larger of two lower bounds, each of which misses some short-lived processes."""
        with_children = 0.0
        for pid in pids:
            fields = self._read(f"{pid}/stat").rsplit(b")", 1)[-1].split()
            if len(fields) > 19:
                own = int(fields[11]) + int(fields[12])
                self._cpu_seen[pid, fields[19]] = own
                with_children += own + int(fields[13]) + int(fields[14])
        return max(with_children, sum(self._cpu_seen.values())) / self._tick

    def _read(self, path: str) -> bytes:
        """Return the text of a file in the sandbox's /proc; nothing if its process has ended."""
        try:
            descriptor = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            parts = []
            while part := os.read(descriptor, 1 << 16):
                parts.append(part)
            return b"".join(parts)
        except OSError:
            return b""
        finally:
            os.close(descriptor)


def _kilobytes(text: bytes, names: tuple) -> int:
    lines = (line.split() for line in text.splitlines() if line.startswith(names))
    return sum(int(fields[1]) << 10 for fields in lines)


if __name__ == "__main__":
    main()
