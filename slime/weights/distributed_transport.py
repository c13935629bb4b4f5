"""Weights by broadcast from trainer rank 0 to the engines: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from slime.utils.sync_http import HttpError
from slime.weights.engine_client import EngineClient, on_all
from slime.weights.liveness import in_background
from slime.weights.process_group import destroy_side_group, init_side_group, serve_store
from slime.weights.transport import Bucket, WeightSyncError

_TIMEOUT = timedelta(minutes=10)
_JOIN_TIMEOUT_S = 300.0
_LEAVE_TIMEOUT_S = 10.0
_COMPLETES_S = 2.0


class DistributedTransport:
    """One process group with the engines, kept from update to update while they stay the same."""

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
            in_background(
                partial(
                    engine.update, "/update_weights_from_distributed", payload, nbytes=bucket.nbytes
                )
            ): engine
            for engine in self._engines
        }
        work = dist.broadcast(flat, group=self._group, group_src=0, async_op=True)
        assert work is not None
        failed = _first_failure(calls)
        if failed is not None:
            engine, error = failed
            self._break_up(work)
            raise WeightSyncError(
                f"bucket {bucket.index} did not arrive: engine {engine.url}: {error}"
            ) from error
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
            engine.update("/init_weights_update_group", body, timeout=_JOIN_TIMEOUT_S)

        group = (self._backend, self._group_name)
        joined = in_background(
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
        invited = {
            in_background(partial(invite, engine, offset)): engine
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
        self._send_away()
        if self._group is not None:
            destroy_side_group(self._group)
            self._group = None

    def _break_up(self, work: dist.Work) -> None:
        """End a group that lost a member, so that the others can be members of a new one.

        Its connections close, which is how engines that wait for the broadcast hear of it. Dropping a
        group waits, with Python's lock held, for what is under way in it: a stuck one is kept.
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
        self._send_away()

    def _send_away(self) -> None:
        def leave(engine: EngineClient) -> None:
            with suppress(HttpError):  # gone, with its share of the group
                body = {"group_name": self._group_name}
                engine.post("/destroy_weights_update_group", body, _LEAVE_TIMEOUT_S)

        on_all(self._engines, leave)


def flatten(bucket: Bucket) -> torch.Tensor:
    """The tensors' bytes end to end, in order, without padding."""
    return torch.cat(
        [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket.tensors]
    )


def _completes(work: dist.Work) -> bool:
    """Whether it ends, well or not; a member that is gone ends it at once."""
    deadline = time.monotonic() + _COMPLETES_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _first_failure(
    calls: dict[Future[None], EngineClient],
) -> tuple[EngineClient, BaseException] | None:
    done, _ = wait(calls, return_when=FIRST_EXCEPTION)
    for future in done:
        if (error := future.exception()) is not None:
            return calls[future], error
    return None
