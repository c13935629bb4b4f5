"""Weights through shared memory to SGLang servers, which take pickled handles of it.

Between processes of one machine only the handle travels: a CUDA IPC handle, or on a CPU the name of a
shared-memory file. All tensors of a bucket are views of one buffer, so it is one handle per bucket.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers reductions of tensors

from slime.core.errors import UserError
from slime.weights.buckets import Bucket, NamedTensor
from slime.weights.engine_client import EngineClient
from slime.weights.ipc import aligned
from slime.weights.transport import (
    PendingCall,
    WeightSyncError,
    WeightTransport,
    naming,
    wait_acknowledged,
)

_ROUTE = "/update_weights_from_tensor"


class SGLangTensorTransport(WeightTransport):
    """One copy of the bucket, shared with every engine on this device until all have acknowledged it."""

    shares_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._engines: list[EngineClient] = []
        self._calls: list[PendingCall] = []
        self._index = -1
        self._shared: torch.Tensor | None = None  # what the engines are reading

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version = engines, version

    def send(self, bucket: Bucket) -> None:
        shared, named = _copy(bucket, self._device)
        self.finish()  # an engine takes one bucket at a time
        self._shared, self._index = shared, bucket.index
        for engine in self._engines:
            body = _payload(named, num_ranks=len(engine.info.device_ids), version=self._version)
            with naming(f"bucket {bucket.index}", engine):
                update = engine.start_update(_ROUTE, body, nbytes=bucket.nbytes)
            self._calls.append((engine, update))

    def finish(self) -> None:
        calls, self._calls = self._calls, []
        try:
            wait_acknowledged(self._index, calls)
        finally:
            self._shared = None

    def close(self) -> None:
        with contextlib.suppress(WeightSyncError):
            self.finish()  # an engine may still be reading
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _copy(bucket: Bucket, device: torch.device) -> tuple[torch.Tensor, list[NamedTensor]]:
    """Copy the bucket into one new buffer: the trainer's own memory must not be shared."""
    shared = torch.empty(bucket.packed_nbytes, dtype=torch.uint8, device=device)
    named, offset = [], 0
    for name, tensor in bucket.tensors:
        view = shared[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        named.append((name, view.copy_(tensor)))
        offset += aligned(tensor.nbytes)
    return shared, named


def _payload(named: list[NamedTensor], *, num_ranks: int, version: int) -> dict[str, Any]:
    """Return the body of the request; the tensors must not change until it is acknowledged.

    Each rank of the engine opens a handle of its own: CUDA handles are counted.
    """
    return {
        "serialized_named_tensors": [serialize(named) for _ in range(num_ranks)],
        "load_format": None,
        "flush_cache": False,
        "weight_version": str(version),
    }


def serialize(tensors: list[NamedTensor] | dict[str, torch.Tensor]) -> str:
    """Pickle handles of tensors for one rank of a server; the tensors must stay alive until it has replied."""
    first = next(iter(dict(tensors).values()))
    _identify_gpus_by_uuid(first.is_cuda)
    buffer = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()


def _identify_gpus_by_uuid(on_gpu: bool) -> None:
    """Apply SGLang's patch of torch's reductions: the engine may number the GPUs differently."""
    if not on_gpu:
        return
    try:
        from sglang.srt.utils.patch_torch import (  # pyright: ignore[reportMissingImports]
            monkey_patch_torch_reductions,
        )
    except ImportError as error:
        if torch.cuda.device_count() == 1:
            return
        raise UserError(
            "--update-weight-transport tensor with several GPUs per process needs sglang in the "
            "trainer's environment too: install it there"
        ) from error
    monkey_patch_torch_reductions()


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU tensors by file name: a file descriptor, torch's default, reaches child processes only."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
