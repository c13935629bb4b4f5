"""The way out of a sandbox: an HTTP CONNECT proxy that reaches the hosts of an allow list and no others.

The proxy runs outside. It accepts on a socket that listens on the loopback interface of the sandbox's network
namespace, which has no other interface; names are resolved outside as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from slime.core.errors import UserError

PORT = 3128  # inside
_HEAD_BYTES = 8192
_CONNECTIONS, _WAITING = 32, 96
_CONNECT_S, _IDLE_S = 20.0, 300.0


@dataclass(frozen=True)
class Allow:
    """The hosts that a sandbox may reach: `Allow(["pypi.org:443", "files.pythonhosted.org:443"])`.

    Addresses of private networks and of this machine must be listed as such (`"10.0.0.5:443"`), in
    addition to a name that resolves to them.
    """

    hosts: Sequence[str]
    pairs: frozenset[tuple[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", frozenset(map(_split, self.hosts)))


def _split(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{text!r} in the sandbox's allow list is not of the form host:port")
    return host.strip("[]").rstrip(".").lower(), int(port)


class Refused(Exception):
    """The status line and the reason that a client gets instead of a connection."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Proxy:
    def __init__(self, allow: Allow) -> None:
        self._allowed = allow.pairs
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        listener.listen(_CONNECTIONS)
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept one connection at a time, so that those above the limit never take descriptors together."""
        with listener:
            while True:
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # this process has no descriptor left
                    await asyncio.sleep(1)
                    continue
                if len(self._tasks) >= _CONNECTIONS + _WAITING:
                    connection.close()
                    continue
                task = asyncio.create_task(self._handle(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _handle(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=_HEAD_BYTES)
        except BaseException:
            connection.close()
            raise
        try:
            async with self._slots:
                await self._serve_client(reader, writer)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError):
            pass  # the client's or the host's end of the connection is gone, or not HTTP
        finally:
            writer.close()

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await asyncio.wait_for(_read_head(reader), _CONNECT_S)
        try:
            host, port = _target(head)
            remote = await asyncio.wait_for(self._connect(host, port), _CONNECT_S)
        except Refused as refused:
            writer.write(f"HTTP/1.1 {refused.status}\r\n\r\n{refused}\n".encode())
            await writer.drain()
            return
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(_relay(reader, remote[1]), _relay(remote[0], writer))
        finally:
            remote[1].close()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Resolve the name once, check the addresses, and connect to one that was checked."""
        if (host, port) not in self._allowed:
            raise Refused("403 Forbidden", f"{host}:{port} is not on the sandbox's allow list")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise Refused("502 Bad Gateway", f"{host} cannot be resolved: {error}") from error
        reason = f"{host} has no address"
        for address in dict.fromkeys(str(entry[4][0]) for entry in found):
            if not is_public(address) and (address, port) not in self._allowed:
                raise Refused("403 Forbidden", f"{host} is {address}, which is not listed itself")
            try:
                return await asyncio.open_connection(address, port)
            except OSError as error:
                reason = str(error)
        raise Refused("502 Bad Gateway", reason)


def is_public(address: str) -> bool:
    """Return whether an address is neither of this machine, of a private network, nor multicast."""
    ip = ipaddress.ip_address(address.split("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_global and not ip.is_multicast


def _target(head: bytes) -> tuple[str, int]:
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) != 3 or words[0] != "CONNECT":
        raise Refused("405 Method Not Allowed", "this proxy supports CONNECT (https) only")
    try:
        return _split(words[1])
    except UserError as error:
        raise Refused("400 Bad Request", "CONNECT needs host:port") from error


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("the head of the request is too long") from error


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await asyncio.wait_for(reader.read(1 << 16), _IDLE_S):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
