"""Runs commands inside a sandbox, as its pid 1: `python agent.py SETTINGS`, started by `Sandbox`.

A message is a line of JSON whose `sizes` are the lengths of the byte strings that follow it. Requests come on
standard input, one at a time, and each is answered on standard output. Programs inside have the same user id:
this process is not dumpable, so that they cannot read or write its memory and descriptors, and as pid 1
it cannot be killed from inside.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time

_PR_SET_DUMPABLE = 4
_CHUNK = 1 << 16
_REAP_S = 0.1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    settings = json.loads(sys.argv[1])
    if settings["proxy_fd"] is not None:
        _send_listener(settings["proxy_fd"], settings["proxy_port"])
    agent = Agent(settings)
    while request := receive():
        header, bodies = request
        try:
            send(*getattr(agent, header.pop("op"))(*bodies, **header))
        except OSError as error:
            send({"error": f"{error.strerror}: {error.filename}"[:1000]})
        except (ValueError, IndexError) as error:  # an invalid command or path
            send({"error": str(error)[:1000]})


def receive():
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    header = json.loads(line)
    return header, [sys.stdin.buffer.read(size) for size in header.pop("sizes")]


def send(header: dict, *bodies: bytes) -> None:
    header = {**header, "sizes": [len(body) for body in bodies]}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + b"".join(bodies))
    sys.stdout.buffer.flush()


def _send_listener(descriptor: int, port: int) -> None:
    """Send a socket that listens in this network namespace to the proxy outside, which accepts on it."""
    with (
        socket.socket(fileno=descriptor) as outside,
        socket.create_server(("127.0.0.1", port)) as listener,
    ):
        socket.send_fds(outside, [b"x"], [listener.fileno()])


class Agent:
    def __init__(self, settings: dict) -> None:
        self._output_bytes = settings["output_bytes"]
        self._disk_bytes = settings["disk_bytes"]
        self._kept: set = set()  # processes of earlier commands that may stay

    def run(self, stdin: bytes, *, argv: list, time_limit_s: float, env: dict, keep: bool):
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=env, start_new_session=True,
        )  # fmt: skip
        command = Command(process, stdin, self._output_bytes)
        try:
            limit = command.wait(time.monotonic() + time_limit_s)
            if limit or not keep:
                kill_others(self._kept)
            else:
                self._kept = set(_processes())
            command.read_rest()
        finally:
            command.close()
        status = 137 if limit else command.status()
        return {"status": status, "limit": limit}, *command.outputs()

    def write(self, data: bytes, *, path: str):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK  # a FIFO must not block
        with open(os.open(path, flags, 0o644), "wb") as file:
            file.write(data)
        return ({},)

    def read(self, *, path: str):
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(22, "not a regular file", path)
            return {}, file.read(self._disk_bytes)


class Command:
    """A command that runs: its streams, and whether it has ended."""

    def __init__(self, process: subprocess.Popen, stdin: bytes, output_bytes: int) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process, self._left_in, self._max_bytes = process, memoryview(stdin), output_bytes
        self._stdin = process.stdin
        self._texts = {process.stdout: bytearray(), process.stderr: bytearray()}
        self._selector = selectors.DefaultSelector()
        self._ended = os.pidfd_open(process.pid)
        self._selector.register(self._ended, selectors.EVENT_READ)
        for stream in self._texts:
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(self._stdin.fileno(), False)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)

    def wait(self, deadline: float) -> str:
        """Serve the streams until the process ends or passes a limit; return the limit's name."""
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, _REAP_S)):
                if key.fileobj == self._ended:
                    return ""
                self._serve(key.fileobj)
            if any(len(text) > self._max_bytes for text in self._texts.values()):
                return "output"
            _reap(self._process.pid)
        return "time"

    def _serve(self, stream) -> None:
        if stream is self._stdin:
            try:
                self._left_in = self._left_in[os.write(stream.fileno(), self._left_in[:_CHUNK]) :]
            except BrokenPipeError:
                self._left_in = memoryview(b"")
            if not self._left_in:
                self._finish(stream)
        elif part := os.read(stream.fileno(), _CHUNK):
            self._texts[stream] += part
        else:
            self._finish(stream)

    def _finish(self, stream) -> None:
        self._selector.unregister(stream)
        stream.close()

    def read_rest(self) -> None:
        """Read what is left in the pipes without waiting: a process that stays may keep them open."""
        for stream, text in self._texts.items():
            with contextlib.suppress(BlockingIOError, ValueError):  # ValueError: closed already
                while len(text) <= self._max_bytes and (part := os.read(stream.fileno(), _CHUNK)):
                    text += part

    def status(self) -> int:
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def outputs(self) -> list:
        return [bytes(text[: self._max_bytes]) for text in self._texts.values()]

    def close(self) -> None:
        self._selector.close()
        os.close(self._ended)
        for stream in (self._stdin, *self._texts):
            with contextlib.suppress(OSError):
                stream.close()
        self._process.poll()


def kill_others(kept: set) -> None:
    """Kill every process but this one and those that may stay, until none is left."""
    while others := [p for p, parent in _processes().items() if kept.isdisjoint((p, parent))]:
        if not kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # atomic: nothing can fork away from it
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        _reap(0)
        time.sleep(0.001)


def _processes() -> dict:
    """Return the parent of every process but this one; processes that have ended are left out."""
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError):
            if name.isdigit() and name != "1":
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rsplit(b")", 1)[1].split()
                num_threads = int(fields[17])  # the first may have ended alone
                if fields[0] not in b"ZX" or num_threads > 1:
                    parents[int(name)] = int(fields[1])
    return parents


def _reap(main: int) -> None:
    """Reap processes whose parents have ended; the command itself is reaped by its Popen."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == main:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


if __name__ == "__main__":
    main()
