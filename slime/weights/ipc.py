"""Buffers that two processes of one machine share: a file in /dev/shm, or CUDA IPC.

The owner creates a `SharedBuffer` and sends what `export()` returns, plain JSON values; the other side
opens it with `import_buffer`, or with `ImportedBuffers` if the owner reuses it. Torch counts the users of a
CUDA export, which must be opened exactly once, so every receiver gets an export of its own; a shared-memory
export may be opened by name any number of times until the owner closes it.
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
_MIN_STALE_AGE_S = 10.0  # the owner of a newer segment may not have locked it yet


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
    """Round up to 64 bytes so that the next tensor in a buffer supports vectorized loads."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SharedBuffer:
    """`size` bytes in `tensor` (uint8, 1-D) that other processes can open; `close()` frees them."""

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
        """Return a handle for one receiver, whose GPU waits for work queued before this call."""
        if self._segment is not None:
            return ShmHandle(kind="shm", name=f"/{self._segment.name}", size=self.size)
        return _export_cuda(self.tensor)

    def unlink(self) -> None:
        """Unlink the file in /dev/shm: processes that have it open keep it, and nothing is left over."""
        if self._segment is not None:
            self._segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlink and unmap; the memory is freed when the last process closes it."""
        del self.tensor
        if self._segment is not None:
            self._segment.close()


class ImportedBuffers:
    """Keeps the two most recently used buffers open, so that each is opened once per update.

    Later writes of the owner are visible. The owner announces a buffer after it has written it, and the
    reader acknowledges it after `finish_reading`.
    """

    _KEPT = 2

    def __init__(self) -> None:
        # By handle, in the order of their last use.
        self._open: dict[str, tuple[contextlib.ExitStack, torch.Tensor]] = {}

    def get(self, handle: BufferHandle) -> torch.Tensor:
        """Return the buffer like `import_buffer`, valid until two other buffers were requested or all are closed."""
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
    """Give the exported bytes as a uint8 tensor, valid inside the `with` only.

    It must not be written to; writes to "shm" would not reach the owner.
    """
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
        raise ValueError(f"unknown kind of shared buffer {handle['kind']!r}: not shm or cuda_ipc")


def _opened(handle: BufferHandle) -> tuple[contextlib.ExitStack, torch.Tensor]:
    stack = contextlib.ExitStack()
    return stack, stack.enter_context(import_buffer(handle))


def finish_reading(tensor: torch.Tensor) -> None:
    """Wait for what this thread queued on a GPU; after that the owner may overwrite the buffer."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def release_export(handle: BufferHandle) -> None:
    """Release an export on behalf of a dead receiver; torch keeps its memory until then."""
    if handle["kind"] == "cuda_ipc":
        counter = _decode(handle["ref_counter"])
        torch.UntypedStorage._release_ipc_counter(counter, handle["ref_counter_offset"])


def collect_exports() -> None:
    """Free the memory of closed CUDA buffers that no receiver has open any more."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def remove_stale_segments() -> list[str]:
    """Unlink this user's segments whose owners died without doing so; return their names.

    An owner holds a lock on its segment as long as it lives, which also works between containers that
    share /dev/shm but not process ids. Files of other users are not touched.
    """
    removed = []
    for path in SHM_DIR.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # removed by another process, or not a file of ours
            if _remove_if_stale(path):
                removed.append(path.name)
    return removed


def _remove_if_stale(path: Path) -> bool:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block
    fd = os.open(path, flags)
    try:
        status = os.fstat(fd)
        too_new = time.time() - status.st_mtime < _MIN_STALE_AGE_S
        if status.st_uid != os.getuid() or too_new or not _try_lock(fd):
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
    with contextlib.suppress(BufferError):  # a view still exists: unmapped with the last one
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
        # A private mapping cannot alter the segment and, unlike a read-only one, is accepted by torch.
        mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    try:
        # Through numpy, which keeps the mapping open while views exist; torch.frombuffer does not.
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
    """Return this process's index of a GPU; CUDA_VISIBLE_DEVICES may differ between processes."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"GPU {uuid} is not visible to this process; CUDA IPC needs the same GPU")


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)
