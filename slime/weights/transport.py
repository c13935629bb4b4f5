"""How buckets of weights reach engines: the interface of all transports, and the default one.

`TensorTransport` uses memory that trainer and engine share: /dev/shm on a CPU, CUDA IPC on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from slime.core.errors import WeightSyncError as WeightSyncError
from slime.utils.sync_http import HttpError
from slime.weights.buckets import Bucket, TensorMetadata, pack
from slime.weights.engine_client import EngineClient
from slime.weights.ipc import BufferHandle, SharedBuffer, release_export

PendingCall = tuple[EngineClient, Callable[[], object]]  # the second waits for the engine's reply


class WeightTransport(ABC):
    """Calls come in this order; `close` also comes after errors.

    open ─▶ (reclaim ─▶ allocate ─▶ send) for each bucket ─▶ finish ─▶ close
    """

    shares_device: bool  # whether a rank on an engine's own device serves it, instead of rank 0

    @abstractmethod
    def open(self, engines: list[EngineClient], version: int) -> None:
        """Prepare to send `version` to the engines this rank serves; there is at least one."""

    def reclaim(self) -> None:
        """Complete what `send` began and wait until the buffer of the next bucket is free.

        Transports that send without buffers have nothing to do.
        """
        return None

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return a buffer (uint8) of at least `nbytes` for the next bucket, or None.

        A bucket that is built there needs no copy to be sent. This only allocates: it sends nothing
        and does not wait. The contents may be read until the bucket after the next is built.
        """
        return None

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Send a bucket, possibly without waiting for the engines to have it.

        Its tensors may change after the return, except those in a buffer of the transport.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return once every engine has every bucket."""

    @abstractmethod
    def close(self) -> None:
        """Release what one update needed; a second call has no effect."""


def wait_acknowledged(index: int, calls: list[PendingCall]) -> None:
    """Wait until every engine has taken bucket `index`; raise the errors of all that have not."""
    errors: list[WeightSyncError] = []
    for engine, finish in calls:
        try:
            with naming(f"bucket {index}", engine):
                finish()
        except WeightSyncError as error:
            errors.append(error)
    if errors:
        raise WeightSyncError("; ".join(str(error) for error in errors)) from errors[0]


@contextmanager
def naming(sent: str, engine: EngineClient) -> Iterator[None]:
    """Raise HTTP errors as a WeightSyncError that names engine and what was sent, such as "bucket 3"."""
    try:
        yield
    except HttpError as error:
        text = f"{sent} did not arrive: engine {engine.url}: {error}"
        raise WeightSyncError(text) from error


_ROUTE = "/update_weights_from_tensor"


@dataclass(kw_only=True, frozen=True)
class _PackedBucket:
    index: int
    nbytes: int
    metadata: list[TensorMetadata]
    ready: torch.cuda.Event | None  # recorded on the GPU after the copies into the buffer


class TensorTransport(WeightTransport):
    """Double buffering: bucket i+1 is packed while engines copy bucket i.

    A buffer is reused only after every engine has acknowledged the bucket in it. Engines open a buffer once
    and keep it open until the end of the update. On a GPU, `send` only queues the copies; engines
    are notified of the bucket by the next `reclaim`, once the GPU has finished them.
    """

    shares_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._engines: list[EngineClient] = []
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._sizes = [0, 0]  # largest so far: growing a buffer costs another export
        self._handles: dict[tuple[int, str], BufferHandle] = {}  # by buffer and engine URL
        self._packed: _PackedBucket | None = None  # not announced yet
        self._in_flight: dict[int, list[PendingCall]] = {}  # by bucket; two at most

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version, self._next = engines, version, 0

    def reclaim(self) -> None:
        """Announce the last bucket, then wait until the one before it is acknowledged."""
        self._announce()
        self._wait_acknowledged(self._next - 2)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        return self._buffer(self._next % 2, nbytes).tensor if self._engines else None

    def send(self, bucket: Bucket) -> None:
        self.reclaim()
        buffer = self._buffer(self._next % 2, bucket.packed_nbytes)
        self._packed = _PackedBucket(
            index=bucket.index,
            nbytes=bucket.nbytes,
            metadata=pack(bucket, buffer.tensor),
            ready=_record_event(self._device),
        )
        self._next = bucket.index + 1
        if self._packed.ready is None:
            self._announce()

    def finish(self) -> None:
        self._announce()
        for index in list(self._in_flight):
            self._wait_acknowledged(index)

    def close(self) -> None:
        self._packed = None
        for index in list(self._in_flight):  # an engine may still be reading a buffer
            with suppress(WeightSyncError):
                self._wait_acknowledged(index)
        dead = {engine.url for engine in self._engines if engine.unresponsive}
        for (_, url), handle in self._handles.items():
            if url in dead:
                release_export(handle)
        for slot in range(2):
            self._drop(slot)
        self._engines = []

    def _announce(self) -> None:
        """Notify the engines of the packed bucket, once the GPU has written it."""
        packed, self._packed = self._packed, None
        if packed is None:
            return
        handles = [self._handle(packed.index % 2, engine) for engine in self._engines]
        if packed.ready is not None:
            packed.ready.synchronize()
        calls = self._in_flight[packed.index] = []
        for engine, handle in zip(self._engines, handles, strict=True):
            payload = _payload(handle, packed.metadata, self._version)
            with naming(f"bucket {packed.index}", engine):
                update = engine.start_update(_ROUTE, payload, nbytes=packed.nbytes)
            calls.append((engine, update))

    def _wait_acknowledged(self, index: int) -> None:
        wait_acknowledged(index, self._in_flight.pop(index, []))

    def _buffer(self, slot: int, size: int) -> SharedBuffer:
        """Return a buffer of at least `size` bytes; the caller ensures that engines no longer read it."""
        buffer = self._buffers[slot]
        if buffer is None or buffer.size < size:
            self._drop(slot)
            self._sizes[slot] = max(self._sizes[slot], size)
            buffer = self._buffers[slot] = _new_buffer(self._sizes[slot], self._device)
        return buffer

    def _handle(self, slot: int, engine: EngineClient) -> BufferHandle:
        key = (slot, engine.url)
        if key not in self._handles:
            buffer = self._buffers[slot]
            assert buffer is not None
            self._handles[key] = buffer.export()
        return self._handles[key]

    def _drop(self, slot: int) -> None:
        buffer, self._buffers[slot] = self._buffers[slot], None
        self._handles = {key: handle for key, handle in self._handles.items() if key[0] != slot}
        if buffer is not None:
            buffer.close()


def _payload(handle: BufferHandle, metadata: list[TensorMetadata], version: int) -> dict[str, Any]:
    """Return the body of /update_weights_from_tensor as the embedded engine takes it.

    Every bucket carries the version: engines are paused, so no token can be stamped with it before
    the last bucket has arrived.
    """
    return {
        "load_format": "slime_shm",
        "handle": handle,
        "metadata": metadata,
        "weight_version": str(version),
        "flush_cache": False,
    }


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes with all work queued on the GPU so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _new_buffer(size: int, device: torch.device) -> SharedBuffer:
    try:
        return SharedBuffer(size, device)
    except OSError as error:
        raise WeightSyncError(
            f"no space for {size / 2**20:.0f} MiB in /dev/shm ({error.strerror}): make it larger, or "
            "lower --update-weight-buffer-size"
        ) from error
