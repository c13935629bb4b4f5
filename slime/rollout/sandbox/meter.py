"""What the processes of a sandbox use together; imported by the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal

_SOCKET_BYTES = 208 << 10
_TCP_SOCKET_BYTES = 10 << 20  # the default maxima of tcp_rmem and tcp_wmem
_FREE_TCP_SOCKETS = 32


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
        """Return the name of a limit that is exceeded, or an empty string."""
        if not self._open():
            return ""
        disk = os.fstatvfs(self._files)
        inodes = (disk.f_files - disk.f_ffree) * 1024  # about what the kernel allocates for each
        if inodes > self._settings["disk_bytes"]:
            return "disk"
        pids = [name for name in os.listdir(self._proc) if name.isdigit()]
        used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize + inodes + self._sockets()
        places = [self._with_memory(pid) for pid in pids]
        if self._memory_passes(places, self._settings["memory_bytes"] - used):
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

    def _with_memory(self, pid: str) -> str:
        """Return the path below /proc that shows the memory of a process.

        This is a thread's path if the first thread of the process has ended and others have not.
        """
        for _ in range(20):  # threads may start and end concurrently
            if self._virtual(pid) or int(_fields(self._read(f"{pid}/stat"))[17]) < 2:
                return pid
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/self/fd/{self._proc}/{pid}/task"):
                    if self._virtual(f"{pid}/task/{thread}"):
                        return f"{pid}/task/{thread}"
        return pid

    def _memory_passes(self, pids: list, most: int) -> bool:
        """Compare cheap upper bounds first; the exact figure requires a walk over the page tables."""
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
        """Return how many bytes the buffers of the sandbox's sockets can hold.

        TCP buffers can grow much larger than others, so each TCP socket beyond `_FREE_TCP_SOCKETS`
        counts with its maximum.
        """
        words = self._read("1/net/sockstat").split() + self._read("1/net/sockstat6").split()
        pairs = dict(zip(words, words[2:], strict=False))
        tcp = int(pairs.get(b"TCP:", 0)) + int(pairs.get(b"TCP6:", 0))
        many = max(0, tcp - _FREE_TCP_SOCKETS)
        return int(pairs.get(b"sockets:", 0)) * _SOCKET_BYTES + many * _TCP_SOCKET_BYTES

    def _cpu_s(self, pids: list) -> float:
        """Return the larger of two lower bounds, each of which misses some short-lived processes."""
        with_children = 0.0
        for pid in pids:
            fields = _fields(self._read(f"{pid}/stat"))
            if fields[17] != b"0":
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


def _fields(stat: bytes) -> list:
    """Return the fields of /proc/PID/stat from the state on; zeros if the process has ended."""
    return stat.rsplit(b")", 1)[-1].split() or [b"0"] * 50


def _kilobytes(text: bytes, names: tuple) -> int:
    lines = (line.split() for line in text.splitlines() if line.startswith(names))
    return sum(int(fields[1]) << 10 for fields in lines)
