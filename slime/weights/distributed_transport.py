"""Weights by broadcast from trainer rank 0 to the engines: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import secrets
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.concurrency import call_all, start_in_thread, wait_until
from slime.utils.sync_http import HttpError
from slime.weights.buckets import Bucket, dtype_name
from slime.weights.engine_client import EngineClient
from slime.weights.process_group import destroy_side_group, init_side_group, serve_store
from slime.weights.transport import WeightSyncError, WeightTransport

_TIMEOUT = timedelta(minutes=10)
_JOIN_TIMEOUT_S = 300.0
_LEAVE_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 2.0


class DistributedTransport(WeightTransport):
    """One process group with the engines, kept between updates as long as the engines are the same."""

    shares_device = False

    def __init__(self, *, host: str, backend: str, timeout: timedelta = _TIMEOUT) -> None:
        self._host, self._backend, self._timeout = host, backend, timeout
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._engines: list[EngineClient] = []
        self._stuck: list[tuple[dist.ProcessGroup, dist.Work]] = []

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._version = version
        members = [engine.url for engine in self._engines]
        if self._group is not None and members != [engine.url for engine in engines]:
            self._leave()
        self._engines = engines
        if self._group is None:
            self._join()

    def send(self, bucket: Bucket) -> None:
        self.broadcast(
            bucket,
            "/update_weights_from_distributed",
            load_format="flattened_bucket",
            weight_version=str(self._version),
            flush_cache=False,
        )

    def broadcast(self, bucket: Bucket, route: str, **options: Any) -> list[Any]:
        """Broadcast the bucket and return the engines' replies, which come once they have it.

        An engine that refuses never joins the broadcast, so the replies are waited for first.
        """
        assert self._group is not None
        flat = flatten(bucket)
        payload = {
            "names": [name for name, _ in bucket.tensors],
            "dtypes": [dtype_name(tensor.dtype) for _, tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for _, tensor in bucket.tensors],
            "group_name": self._group_name,
            **options,
        }
        calls = {
            start_in_thread(partial(engine.update, route, payload, nbytes=bucket.nbytes)): engine
            for engine in self._engines
        }
        work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
        assert work is not None
        failed = _first_failure(calls)
        if failed is not None:
            engine, error = failed
            self._abort_group(work)
            raise WeightSyncError(
                f"bucket {bucket.index} did not arrive: engine {engine.url}: {error}"
            ) from error
        work.wait()
        return [call.result() for call in calls]

    def finish(self) -> None:
        """Do nothing: every `send` waits for the engines."""

    def close(self) -> None:
        """Keep the process group: creating it costs more than a small update."""

    def _join(self) -> None:
        sizes = [len(engine.info.device_ids) for engine in self._engines]
        world_size = 1 + sum(sizes)
        self._group_name = f"slime_weights_{secrets.token_hex(4)}"
        store, init_method = serve_store(self._host, world_size)
        offsets = [1 + sum(sizes[:number]) for number in range(len(sizes))]

        def join(engine: EngineClient, offset: int) -> None:
            body = {
                "master_address": self._host,
                "master_port": int(init_method.rsplit(":", 1)[1]),
                "rank_offset": offset,
                "world_size": world_size,
                "group_name": self._group_name,
                "backend": self._backend,
            }
            engine.update("/init_weights_update_group", body, timeout=_JOIN_TIMEOUT_S)

        group = (self._backend, self._group_name)
        joined = start_in_thread(
            partial(
                init_side_group,
                init_method,
                0,
                world_size,
                *group,
                store=store,
                timeout=self._timeout,
            )
        )
        joining = {
            start_in_thread(partial(join, engine, offset)): engine
            for engine, offset in zip(self._engines, offsets, strict=True)
        }
        failed = _first_failure(joining)
        if failed is not None:
            engine, error = failed
            raise WeightSyncError(
                f"engine {engine.url} did not join the weight group: {error}"
            ) from error
        self._group = joined.result()

    def _leave(self) -> None:
        """Destroy the group; engines in it may be dead."""
        self._destroy_engine_groups()
        if self._group is not None:
            destroy_side_group(self._group)
            self._group = None

    def _abort_group(self, work: dist.Work) -> None:
        """Destroy a group that lost a member, so that the other engines can join a new one.

        Its connections close, which ends the broadcast on engines that wait in it. Destroying a group
        waits, with the GIL held, for its pending work: a group with stuck work is kept instead.
        """
        group, self._group = self._group, None
        assert group is not None
        if self._backend == "nccl":
            group.abort()
        if _completes(work):
            destroy_side_group(group)
        else:
            self._stuck.append((group, work))
        del group, work
        self._destroy_engine_groups()

    def _destroy_engine_groups(self) -> None:
        def leave(engine: EngineClient) -> None:
            with suppress(HttpError):  # a dead engine has left the group
                body = {"group_name": self._group_name}
                engine.post("/destroy_weights_update_group", body, _LEAVE_TIMEOUT_S)

        call_all(self._engines, leave)


def flatten(bucket: Bucket) -> torch.Tensor:
    """Concatenate the bytes of the tensors in order, without padding."""
    return torch.cat(
        [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket.tensors]
    )


def _completes(work: dist.Work) -> bool:
    """Return whether the work ends soon, if only with an error, as it does after a member died."""
    return wait_until(work.is_completed, _ABORT_TIMEOUT_S)


def _first_failure(
    calls: dict[Future[Any], EngineClient],
) -> tuple[EngineClient, BaseException] | None:
    """Wait until all calls have ended or one has failed; return the engine that failed and its error."""
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    for future in done:
        if (error := future.exception()) is not None:
            return calls[future], error
    return None
