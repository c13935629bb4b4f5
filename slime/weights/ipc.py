"""Buffers of bytes that two processes of one machine share: a file in /dev/shm, or CUDA IPC.

The owner makes a `SharedBuffer` and sends what `export()` returns, plain JSON values; the other side
opens it with `import_buffer`, or with `ImportedBuffers` where the owner fills it again and again. A CUDA
export is counted by torch and must be opened exactly once, so every receiver gets an export of its own;
a shared-memory export may be opened by name any number of times until the owner closes it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch

SHM_DIR = Path("/dev/shm")
_PREFIX = "slime_"
_ALIGNMENT = 64  # bytes
_NAME = re.compile(r"/slime_[0-9a-zA-Z_]+")
_YOUNG_SECONDS = 10.0  # a segment this new may not have been locked by its maker yet


class ShmHandle(TypedDict):
    kind: Literal["shm"]
    name: str  # "/slime_...", as shm_open takes it
    size: int


class CudaHandle(TypedDict):
    kind: Literal["cuda_ipc"]
    device: str  # uuid of the GPU
    size: int
    handle: str  # bytes as base64, as are `ref_counter` and `event`
    storage_size: int
    storage_offset: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    event_sync: bool


BufferHandle = ShmHandle | CudaHandle


def aligned(nbytes: int) -> int:
    """As long that what follows it in a buffer begins where a GPU reads several elements at once."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SharedBuffer:
    """`size` bytes at `tensor` (uint8, 1-D) which other processes can open; `close()` gives them back."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        if size <= 0:
            raise ValueError(f"a shared buffer needs a positive size, not {size}")
        self.size = size
        self._segment: _Segment | None = None
        if torch.device(device).type == "cpu":
            self._segment = _Segment(size)
            self.tensor = torch.from_numpy(self._segment.array)
        else:
            self.tensor = torch.empty(size, dtype=torch.uint8, device=device)

    def export(self) -> BufferHandle:
        """What one receiver needs; its GPU waits for what was queued before this call."""
        if self._segment is not None:
            return ShmHandle(kind="shm", name=f"/{self._segment.name}", size=self.size)
        return _export_cuda(self.tensor)

    def close(self) -> None:
        """Unlink and unmap; the memory itself goes when the last user lets go of it."""
        del self.tensor
        if self._segment is not None:
            self._segment.close()


class ImportedBuffers:
    """Buffers that an owner fills by turns, each opened once; the two that were used last stay open.

    What the owner writes later is seen: before it does, a reader must be done (`finish_reading`), and
    before the reader is told, the owner must be done writing.
    """

    _KEPT = 2

    def __init__(self) -> None:
        # By handle, the one used last at the end.
        self._open: dict[str, tuple[contextlib.ExitStack, torch.Tensor]] = {}

    def get(self, handle: BufferHandle) -> torch.Tensor:
        """As `import_buffer` gives it, valid until two others were asked for or all are closed."""
        key = json.dumps(handle, sort_keys=True)
        self._open[key] = self._open.pop(key, None) or _opened(handle)
        while len(self._open) > self._KEPT:
            self._close(next(iter(self._open)))
        return self._open[key][1]

    def close(self) -> None:
        for key in list(self._open):
            self._close(key)

    def _close(self, key: str) -> None:
        stack, _ = self._open.pop(key)
        stack.close()


@contextlib.contextmanager
def import_buffer(handle: BufferHandle) -> Iterator[torch.Tensor]:
    """The exported bytes as a uint8 tensor, valid inside the `with` only; writing to it is not seen
    by the owner in the "shm" case and must not be done in the "cuda_ipc" case."""
    if handle["kind"] == "shm":
        with _map_segment(handle["name"], handle["size"]) as tensor:
            yield tensor
    elif handle["kind"] == "cuda_ipc":
        tensor = _import_cuda(handle)
        try:
            yield tensor
        finally:
            finish_reading(tensor)
    else:
        raise ValueError(f"unknown kind of shared buffer {handle['kind']!r}; know shm, cuda_ipc")


def _opened(handle: BufferHandle) -> tuple[contextlib.ExitStack, torch.Tensor]:
    stack = contextlib.ExitStack()
    return stack, stack.enter_context(import_buffer(handle))


def finish_reading(tensor: torch.Tensor) -> None:
    """Wait for what this thread queued on a GPU: the owner may overwrite the buffer from then on."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def release_export(handle: BufferHandle) -> None:
    """In place of a receiver that is gone: torch keeps the memory until it is told."""
    if handle["kind"] == "cuda_ipc":
        counter = _decode(handle["ref_counter"])
        torch.UntypedStorage._release_ipc_counter(counter, handle["ref_counter_offset"])


def collect_exports() -> None:
    """Take back memory of closed CUDA buffers whose receivers have let go of them."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def remove_stale_segments() -> list[str]:
    """Unlink this user's segments whose owners died without doing so; return their names.

    An owner holds a lock on its segment as long as it lives, which also holds between containers that
    share /dev/shm but not process ids. What other users put there is left alone.
    """
    removed = []
    for path in SHM_DIR.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed meanwhile, or no file of ours
            if _remove_if_stale(path):
                removed.append(path.name)
    return removed


def _remove_if_stale(path: Path) -> bool:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
    fd = os.open(path, flags)
    try:
        status = os.fstat(fd)
        young = time.time() - status.st_mtime < _YOUNG_SECONDS
        if status.st_uid != os.getuid() or young or not _try_lock(fd):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)


class _Segment:
    """A file under /dev/shm, mapped and locked by this process, readable by its user alone.

    Plain files and not `multiprocessing.shared_memory`: its resource tracker unlinks segments when
    any process that merely attached to them exits.
    """

    def __init__(self, size: int) -> None:
        self.name = f"{_PREFIX}{os.getpid()}_{secrets.token_hex(8)}"
        self.path = SHM_DIR / self.name
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _try_lock(self._fd)
            os.posix_fallocate(self._fd, 0, size)  # a full /dev/shm fails here, not by SIGBUS later
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self.array = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        del self.array
        _close_map(self._map)
        os.close(self._fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_map(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a view is still alive: unmapped when that goes
        mapping.close()


@contextlib.contextmanager
def _map_segment(name: str, size: int) -> Iterator[torch.Tensor]:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a slime segment")
    fd = os.open(f"{SHM_DIR}{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd).st_size
        if not 0 < size <= found:
            raise ValueError(f"segment {name} holds {found} bytes, the handle says {size}")
        # A private mapping cannot alter the segment, and unlike a read-only one torch accepts it.
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    try:
        # By way of numpy, which keeps the mapping open while views live; torch.frombuffer does not.
        yield torch.from_numpy(np.frombuffer(mapping, np.uint8))
    finally:
        _close_map(mapping)


def _export_cuda(tensor: torch.Tensor) -> CudaHandle:
    shared = tensor.untyped_storage()._share_cuda_()
    _, handle, size, offset, ref_counter, ref_counter_offset, event, event_sync = shared
    return CudaHandle(
        kind="cuda_ipc",
        device=str(torch.cuda.get_device_properties(tensor.device).uuid),
        size=tensor.numel(),
        handle=_encode(handle),
        storage_size=size,
        storage_offset=offset,
        ref_counter=_encode(ref_counter),
        ref_counter_offset=ref_counter_offset,
        event=_encode(event),
        event_sync=event_sync,
    )


def _import_cuda(handle: CudaHandle) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(
        _device_index(handle["device"]),
        _decode(handle["handle"]),
        handle["storage_size"],
        handle["storage_offset"],
        _decode(handle["ref_counter"]),
        handle["ref_counter_offset"],
        _decode(handle["event"]),
        handle["event_sync"],
    )
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[: handle["size"]]


def _device_index(uuid: str) -> int:
    """This process's number for a GPU; CUDA_VISIBLE_DEVICES may number them differently elsewhere."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"GPU {uuid} is not visible to this process; CUDA IPC needs the same GPU")


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)
