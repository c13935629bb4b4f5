"""Weights through shared memory to SGLang servers, which take handles in a pickle."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from slime.weights.engine_client import EngineClient
from slime.weights.sglang_payload import tensor_update
from slime.weights.transport import Bucket, WeightSyncError


class SGLangTensorTransport:
    """One copy of the bucket, shared with every engine on this device until all have answered."""

    shares_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._calls: list[tuple[EngineClient, Future[None]]] = []
        self._index = -1
        self._shared: torch.Tensor | None = None

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version = engines, version
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="weight-sync")

    def send(self, bucket: Bucket) -> None:
        assert self._pool is not None
        shared, named = _copy(bucket, self._device)
        self.finish()  # one bucket at a time per engine
        self._shared, self._index = shared, bucket.index
        for engine in self._engines:
            ranks = len(engine.info.device_ids)
            body = tensor_update(named, num_ranks=ranks, version=self._version)
            call = self._pool.submit(
                engine.update, "/update_weights_from_tensor", body, nbytes=bucket.nbytes
            )
            self._calls.append((engine, call))

    def finish(self) -> None:
        calls, self._calls = self._calls, []
        errors = [(engine, error) for engine, call in calls if (error := call.exception())]
        self._shared = None
        if errors:
            text = "; ".join(f"engine {engine.url}: {error}" for engine, error in errors)
            raise WeightSyncError(f"bucket {self._index} did not arrive: {text}") from errors[0][1]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)  # an engine may still be reading
            self._pool = None
        self._calls, self._shared = [], None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _copy(
    bucket: Bucket, device: torch.device
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    """The bucket's tensors as views of one new buffer: what is shared must not be the trainer's own."""
    align = 64
    sizes = [-(-tensor.nbytes // align) * align for _, tensor in bucket.tensors]
    shared = torch.empty(max(sum(sizes), align), dtype=torch.uint8, device=device)
    named, offset = [], 0
    for (name, tensor), size in zip(bucket.tensors, sizes, strict=True):
        view = shared[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        named.append((name, view.copy_(tensor)))
        offset += size
    return shared, named
