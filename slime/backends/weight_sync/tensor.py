"""Weights through memory that trainer and engine share: /dev/shm on a CPU, CUDA IPC on a GPU."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from slime.backends.weight_sync.engine_client import EngineClient
from slime.backends.weight_sync.payloads import tensor_payload
from slime.backends.weight_sync.types import Bucket, WeightSyncError
from slime.utils.ipc import SharedBuffer

_ALIGNMENT = 64


class TensorTransport:
    """Two buffers by turns: the next bucket is gathered and packed while engines copy the last one."""

    shares_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[SharedBuffer | None] = [None, None]
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: tuple[int, list[tuple[EngineClient, Future[None]]]] | None = None

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version = engines, version
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="weight-sync")

    def send(self, bucket: Bucket) -> None:
        assert self._pool is not None
        buffer = self._buffer(bucket)
        metadata = pack(bucket, buffer.tensor)
        self.finish()  # one bucket at a time per engine; the other buffer is free from here on
        calls = []
        for engine in self._engines:
            payload = tensor_payload(buffer.export(), metadata, self._version)
            call = self._pool.submit(
                engine.update, "/update_weights_from_tensor", payload, nbytes=bucket.nbytes
            )
            calls.append((engine, call))
        self._in_flight = (bucket.index, calls)

    def finish(self) -> None:
        if self._in_flight is None:
            return
        (index, calls), self._in_flight = self._in_flight, None
        errors = [(engine, error) for engine, call in calls if (error := call.exception())]
        if errors:
            text = "; ".join(f"engine {engine.url}: {error}" for engine, error in errors)
            raise WeightSyncError(f"bucket {index} did not arrive: {text}") from errors[0][1]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)  # an engine may still be reading a buffer
            self._pool = None
        self._in_flight = None
        for slot, buffer in enumerate(self._buffers):
            if buffer is not None:
                self._buffers[slot] = None
                buffer.close()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _buffer(self, bucket: Bucket) -> SharedBuffer:
        slot, size = bucket.index % 2, packed_size(bucket)
        buffer = self._buffers[slot]
        if buffer is None or buffer.size < size:
            if buffer is not None:
                self._buffers[slot] = None
                buffer.close()
            buffer = self._buffers[slot] = _allocate(size, self._device)
        return buffer


def packed_size(bucket: Bucket) -> int:
    return sum(_aligned(tensor.nbytes) for _, tensor in bucket.tensors) or _ALIGNMENT


def pack(bucket: Bucket, buffer: torch.Tensor) -> list[dict[str, Any]]:
    """Copy the tensors into the buffer and say where each lies."""
    metadata, places, offset = [], [], 0
    for name, tensor in bucket.tensors:
        place = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        places.append(place)
        dtype = str(tensor.dtype).removeprefix("torch.")
        metadata.append(
            {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}
        )
        offset += _aligned(tensor.nbytes)
    if places:
        torch._foreach_copy_(places, [tensor for _, tensor in bucket.tensors], non_blocking=True)
    return metadata


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _allocate(size: int, device: torch.device) -> SharedBuffer:
    try:
        return SharedBuffer(size, device)
    except OSError as error:
        raise WeightSyncError(
            f"no room for {size / 2**20:.0f} MiB in /dev/shm ({error.strerror}): make it larger, or "
            "lower --update-weight-buffer-size"
        ) from error
