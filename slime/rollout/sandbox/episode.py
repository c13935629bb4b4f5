"""A sandbox that lives as long as an episode of an agent: several commands, one working folder."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.rollout.sandbox.process import ENVIRONMENT, Limits, SandboxProcess, start
from slime.rollout.sandbox.program import RunResult, check_sandbox
from slime.rollout.sandbox.proxy import PORT, Allow, Proxy

_AGENT = Path(__file__).with_name("agent.py")
_ANSWER_S = 15.0  # on top of a command's time limit, for an agent that its programs slow down
_USERS = b"sandbox:x:65534:65534::/tmp/work:/bin/sh\n"
EPISODE_LIMITS = Limits(
    memory_bytes=2 << 30, processes=128, forks=True, disk_bytes=512 << 20, open_files=256
)


class SandboxEnded(RuntimeError):
    """The sandbox was killed, by a limit or by `close`, and with it everything in it."""


class Sandbox:
    """A working folder, and commands that see it, until the end of the `async with` block.

        async with Sandbox(network=Allow(["pypi.org:443"])) as box:
            await box.write("main.py", b"print(6 * 7)")
            result = await box.run("python main.py", time_limit_s=10)     # result.stdout == "42\\n"

    Processes of a command end with it, unless `keep_processes` is given. The limits hold for everything
    in the sandbox together; when its memory, disk or CPU time is used up, all of it is killed.
    """

    def __init__(
        self,
        *,
        limits: Limits = EPISODE_LIMITS,
        read_only: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        network: Allow | None = None,
    ) -> None:
        self._limits, self._read_only = limits, tuple(read_only)
        self._proxy = Proxy(network) if network else None
        self._env = {
            **ENVIRONMENT, "PATH": f"{sys.prefix}/bin:{ENVIRONMENT['PATH']}",
            **(_proxy_variables() if network else {}), **(env or {}),
        }  # fmt: skip
        self._process: SandboxProcess | None = None
        self._lock = asyncio.Lock()
        self._ended = "not started"

    async def __aenter__(self) -> Sandbox:
        check_sandbox()
        ours, theirs = socket.socketpair() if self._proxy else (None, None)
        settings = {
            "output_bytes": self._limits.output_bytes, "disk_bytes": self._limits.disk_bytes,
            "proxy_fd": theirs.fileno() if theirs else None, "proxy_port": PORT,
        }  # fmt: skip
        self._process = await start(
            [sys.executable, "-I", "-S", "/agent.py", json.dumps(settings)],
            limits=self._limits,
            read_only=self._read_only,
            files={"/agent.py": _AGENT.read_bytes(), "/etc/passwd": _USERS},
            inherit=(theirs.fileno(),) if theirs else (),
            network=self._proxy is not None,
        )
        self._ended = ""
        if self._proxy and ours and theirs:
            theirs.close()
            try:
                await self._proxy.serve(await asyncio.to_thread(_receive_listener, ours))
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill everything in the sandbox; its files are gone."""
        self._ended = self._ended or "closed"
        if self._process is not None:
            await self._process.close()
        if self._proxy is not None:
            await self._proxy.close()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = b"",
        time_limit_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        keep_processes: bool = False,
    ) -> RunResult:
        """Run a command to its end or to a limit; a string is a line for the shell."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        stdin = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
        header = {
            "op": "run", "argv": argv, "time_limit_s": time_limit_s, "env": {**self._env, **(env or {})},
            "keep": keep_processes,
        }  # fmt: skip
        try:
            answer, bodies = await self._ask(header, stdin, time_limit_s=time_limit_s)
        except SandboxEnded:
            return RunResult(stdout="", stderr="", exit_status=137, limit=self._ended)
        if "error" in answer:
            return RunResult(stdout="", stderr=f"{answer['error']}\n", exit_status=127)
        output, errors = (body.decode(errors="replace") for body in bodies)
        limit = str(answer["limit"])
        return RunResult(
            stdout=output, stderr=errors, exit_status=int(answer["status"]),
            timed_out=limit in ("time", "output"), limit=limit,
        )  # fmt: skip

    async def write(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Write a file; a relative path is in the working folder, missing folders are made."""
        answer, _ = await self._ask({"op": "write", "path": os.fspath(path)}, data)
        if "error" in answer:
            raise OSError(str(answer["error"]))

    async def read(self, path: str | os.PathLike[str]) -> bytes:
        """Return the content of a regular file in the sandbox."""
        answer, bodies = await self._ask({"op": "read", "path": os.fspath(path)})
        if "error" in answer:
            raise OSError(str(answer["error"]))
        return bodies[0]

    async def _ask(
        self, header: dict[str, Any], *bodies: bytes, time_limit_s: float = 0.0
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request to the agent inside and return its answer, or end the sandbox."""
        async with self._lock:
            if self._ended or self._process is None:
                raise SandboxEnded(f"the sandbox has ended ({self._ended})")
            try:
                exchange = self._exchange(self._process, header, bodies)
                return await asyncio.wait_for(exchange, time_limit_s + _ANSWER_S)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                await self._end("")
                raise SandboxEnded(f"the sandbox has ended ({self._ended})") from error
            except asyncio.TimeoutError as error:
                await self._end("time")
                raise SandboxEnded("the sandbox did not answer in time") from error
            except BaseException:  # cancelled: half an answer may be in the pipe
                await self._end("cancelled")
                raise

    async def _exchange(
        self, process: SandboxProcess, header: dict[str, Any], bodies: Sequence[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a message and return the reply, which is untrusted: sizes are checked before it is read."""
        line = json.dumps({**header, "sizes": [len(body) for body in bodies]})
        process.stdin.write(line.encode() + b"\n" + b"".join(bodies))
        await process.stdin.drain()
        answer = json.loads(await process.stdout.readuntil(b"\n"))
        sizes = answer.pop("sizes")
        most = 2 * max(self._limits.output_bytes, self._limits.disk_bytes)
        if min(sizes, default=0) < 0 or sum(sizes) > most:
            raise ValueError("an answer that is longer than the limits")
        return answer, [await process.stdout.readexactly(size) for size in sizes]

    async def _end(self, reason: str) -> None:
        assert self._process is not None
        await self._process.close()
        self._ended = reason or self._process.limit or "killed"
        if self._proxy is not None:
            await self._proxy.close()


def _proxy_variables() -> dict[str, str]:
    address = f"http://127.0.0.1:{PORT}"
    return dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)


def _receive_listener(channel: socket.socket) -> socket.socket:
    with channel:
        channel.settimeout(_ANSWER_S)
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not descriptors:
            raise SandboxEnded("the sandbox did not start")
        return socket.socket(fileno=descriptors[0])
