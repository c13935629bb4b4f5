"""Weights by broadcast from trainer rank 0 to the engines: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from slime.backends.weight_sync.engine_client import EngineClient
from slime.backends.weight_sync.types import Bucket, WeightSyncError
from slime.utils.process_group import destroy_side_group, init_side_group, serve_store
from slime.utils.sync_http import HttpError

_JOIN_TIMEOUT = timedelta(minutes=2)


class DistributedTransport:
    """One process group with the engines, kept from update to update while they stay the same."""

    shares_device = False

    def __init__(self, *, host: str, backend: str) -> None:
        self._host, self._backend = host, backend
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._engines: list[EngineClient] = []

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._version = version
        members = [engine.url for engine in self._engines]
        if self._group is not None and members != [engine.url for engine in engines]:
            self._leave()
        self._engines = engines
        if self._group is None:
            self._join()

    def send(self, bucket: Bucket) -> None:
        """The engines answer once they have it; an engine that refuses would never join the
        broadcast, so its answer is what is waited for."""
        assert self._group is not None
        flat = flatten(bucket)
        payload = {
            "names": [name for name, _ in bucket.tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for _, tensor in bucket.tensors],
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            "weight_version": str(self._version),
            "flush_cache": False,
        }
        calls = {
            _in_background(
                partial(engine.update, "/update_weights_from_distributed", payload)
            ): engine
            for engine in self._engines
        }
        work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
        failed = _first_failure(calls)
        if failed is not None:
            # Not destroyed: that would wait, with Python's lock held, for the broadcast to time out.
            self._group = None
            engine, error = failed
            raise WeightSyncError(
                f"bucket {bucket.index} did not arrive: engine {engine.url}: {error}"
            ) from error
        assert work is not None
        work.wait()

    def finish(self) -> None:
        """Every `send` has waited already."""

    def close(self) -> None:
        """Keep the group: joining costs more than small updates do."""

    def _join(self) -> None:
        sizes = [len(engine.info.device_ids) for engine in self._engines]
        world_size = 1 + sum(sizes)
        self._group_name = f"slime_weights_{secrets.token_hex(4)}"
        store, init_method = serve_store(self._host, world_size)
        offsets = [1 + sum(sizes[:number]) for number in range(len(sizes))]

        def invite(engine: EngineClient, offset: int) -> None:
            body = {
                "master_address": self._host,
                "master_port": int(init_method.rsplit(":", 1)[1]),
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": self._group_name,
                "backend": self._backend,
            }
            engine.update("/init_weights_update_group", body)

        group = (self._backend, self._group_name)
        joined = _in_background(
            partial(
                init_side_group,
                init_method,
                0,
                world_size,
                *group,
                store=store,
                timeout=_JOIN_TIMEOUT,
            )
        )
        invited = {
            _in_background(partial(invite, engine, offset)): engine
            for engine, offset in zip(self._engines, offsets, strict=True)
        }
        failed = _first_failure(invited)
        if failed is not None:
            engine, error = failed
            raise WeightSyncError(
                f"engine {engine.url} did not join the weight group: {error}"
            ) from error
        self._group = joined.result()

    def _leave(self) -> None:
        """Take leave of engines that may be gone."""
        for engine in self._engines:
            try:
                engine.post("/destroy_weights_update_group", {"group_name": self._group_name}, 10.0)
            except HttpError:  # gone, with its share of the group
                continue
        if self._group is not None:
            destroy_side_group(self._group)
            self._group = None


def flatten(bucket: Bucket) -> torch.Tensor:
    """The tensors' bytes end to end, in order, without padding."""
    return torch.cat(
        [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket.tensors]
    )


def _first_failure(
    calls: dict[Future[None], EngineClient],
) -> tuple[EngineClient, BaseException] | None:
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    for future in done:
        if (error := future.exception()) is not None:
            return calls[future], error
    return None


def _in_background(call: Callable[[], object]) -> Future:
    """On a daemon thread: a group that never forms must not keep the process from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight-group").start()
    return future
