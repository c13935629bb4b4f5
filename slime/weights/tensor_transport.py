"""Weights through memory that trainer and engine share: /dev/shm on a CPU, CUDA IPC on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from slime.utils.sync_http import HttpError
from slime.weights.engine_client import EngineClient
from slime.weights.ipc import BufferHandle, SharedBuffer, aligned, release_export
from slime.weights.payloads import tensor_payload
from slime.weights.transport import Bucket, WeightSyncError

_ROUTE = "/update_weights_from_tensor"

Metadata = dict[str, Any]  # as /update_weights_from_tensor takes it
Call = tuple[
    EngineClient, Callable[[], None]
]  # one that was started, and what waits for its answer


@dataclass(kw_only=True, frozen=True)
class _Packed:
    """A bucket in its buffer; `done` happens when a GPU has really put it there."""

    index: int
    nbytes: int
    metadata: list[Metadata]
    done: torch.cuda.Event | None


class TensorTransport:
    """Two buffers by turns: the next bucket is gathered, packed and sent while engines copy the last.

    Engines open a buffer once and keep it open until the end of the update. On a GPU the two processes
    keep out of each other's way by waiting: a bucket is announced once it is packed, as late as the next
    one is made, and a buffer is packed again once every engine has said that it copied what was in it,
    which is over by then.
    """

    shares_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._engines: list[EngineClient] = []
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._sizes = [0, 0]  # what was needed so far: a larger bucket costs one more export
        self._handles: dict[tuple[int, str], BufferHandle] = {}  # by buffer and engine
        self._packed: _Packed | None = None  # not announced yet
        self._in_flight: dict[int, list[Call]] = {}  # by bucket: the last two at most

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version, self._next = engines, version, 0

    def room(self, nbytes: int) -> torch.Tensor | None:
        """Where the next bucket will lie: made there, it need not be packed. It may be written to until
        it is sent, and read until the bucket after the next is made or the transport closed."""
        if not self._engines:
            return None
        self._announce()
        self._finish(self._next - 2)
        return self._buffer(self._next % 2, nbytes).tensor

    def send(self, bucket: Bucket) -> None:
        self._announce()
        slot, self._next = bucket.index % 2, bucket.index + 1
        self._finish(bucket.index - 2)  # which was in the same buffer
        buffer = self._buffer(slot, packed_size(bucket))
        self._packed = _Packed(
            index=bucket.index,
            nbytes=bucket.nbytes,
            metadata=pack(bucket, buffer.tensor),
            done=_mark(self._device),
        )
        if self._packed.done is None:
            self._announce()

    def finish(self) -> None:
        self._announce()
        for index in list(self._in_flight):
            self._finish(index)

    def _announce(self) -> None:
        packed, self._packed = self._packed, None
        if packed is None:
            return
        handles = [self._handle(packed.index % 2, engine) for engine in self._engines]
        if packed.done is not None:
            packed.done.synchronize()
        calls = self._in_flight[packed.index] = []
        for engine, handle in zip(self._engines, handles, strict=True):
            payload = tensor_payload(handle, packed.metadata, self._version)
            with _losing(packed.index, engine):
                update = engine.start_update(_ROUTE, payload, nbytes=packed.nbytes)
            calls.append((engine, update))

    def _finish(self, index: int) -> None:
        errors: list[WeightSyncError] = []
        for engine, finish in self._in_flight.pop(index, []):
            try:
                with _losing(index, engine):
                    finish()
            except WeightSyncError as error:
                errors.append(error)
        if errors:
            raise WeightSyncError("; ".join(str(error) for error in errors)) from errors[0]

    def close(self) -> None:
        self._packed = None
        for index in list(self._in_flight):  # an engine may still be reading a buffer
            with suppress(WeightSyncError):
                self._finish(index)
        gone = {engine.url for engine in self._engines if engine.silent}
        for (_, url), handle in self._handles.items():
            if url in gone:
                release_export(handle)
        for slot in range(2):
            self._drop(slot)
        self._engines = []

    def _buffer(self, slot: int, size: int) -> SharedBuffer:
        """Its last bucket has been answered: it may be replaced by a larger one."""
        buffer = self._buffers[slot]
        if buffer is None or buffer.size < size:
            self._drop(slot)
            self._sizes[slot] = max(self._sizes[slot], size)
            buffer = self._buffers[slot] = _allocate(self._sizes[slot], self._device)
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


@contextmanager
def _losing(index: int, engine: EngineClient) -> Iterator[None]:
    """Whatever fails inside is the loss of a bucket."""
    try:
        yield
    except HttpError as error:
        text = f"bucket {index} did not arrive: engine {engine.url}: {error}"
        raise WeightSyncError(text) from error


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Happens when all that was queued on the GPU so far is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def packed_size(bucket: Bucket) -> int:
    return sum(aligned(tensor.nbytes) for _, tensor in bucket.tensors) or aligned(1)


def pack(bucket: Bucket, buffer: torch.Tensor) -> list[Metadata]:
    """Copy the tensors into the buffer, unless they lie there, and say where each lies."""
    start, size = buffer.data_ptr(), buffer.numel()
    offsets = [tensor.data_ptr() - start for _, tensor in bucket.tensors]
    inside = [
        0 <= offset <= size - tensor.nbytes
        for offset, (_, tensor) in zip(offsets, bucket.tensors, strict=True)
    ]
    if all(inside):
        return [
            _describe(name, tensor, offset)
            for offset, (name, tensor) in zip(offsets, bucket.tensors, strict=True)
        ]
    metadata, places, sources, offset = [], [], [], 0
    for (name, tensor), lies_there in zip(bucket.tensors, inside, strict=True):
        place = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        places.append(place)
        sources.append(tensor.clone() if lies_there else tensor)
        metadata.append(_describe(name, tensor, offset))
        offset += aligned(tensor.nbytes)
    torch._foreach_copy_(places, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
    return metadata


def _describe(name: str, tensor: torch.Tensor, offset: int) -> Metadata:
    dtype = _dtype_name(tensor.dtype)
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _allocate(size: int, device: torch.device) -> SharedBuffer:
    try:
        return SharedBuffer(size, device)
    except OSError as error:
        raise WeightSyncError(
            f"no room for {size / 2**20:.0f} MiB in /dev/shm ({error.strerror}): make it larger, or "
            "lower --update-weight-buffer-size"
        ) from error
