"""One whole weight update, the same on every trainer rank and for every transport.

Engines pause with mode "retract": running requests go back to the queue with the tokens and log-probs
they have, the KV cache is dropped, and after the update their tokens are prefilled with the new weights.
Updates of a LoRA adapter alone are in `lora_sync.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.config.env import read_env
from slime.core.errors import UserError, WeightMismatchError
from slime.core.types import EngineInfo, SyncReport
from slime.utils.addresses import engine_url, own_host
from slime.utils.concurrency import call_all
from slime.utils.device import collective_backend, current_device, device_id
from slime.weights.buckets import Bucket, CastBucket, HFTensors
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.engine_client import EngineClient, LivenessProbe
from slime.weights.fp8 import quantize_all
from slime.weights.fp8_format import quantized_in
from slime.weights.hf_folder import DiskTransport
from slime.weights.ipc import collect_exports, remove_stale_segments
from slime.weights.sglang_checksums import ModelFacts, model_facts
from slime.weights.sglang_transport import SGLangTensorTransport
from slime.weights.transport import TensorTransport, WeightSyncError, WeightTransport
from slime.weights.verify import SentWeights, SGLangCheck, check_checksums, check_versions

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}


def make_weight_sync(args: Args) -> WeightSync:
    return WeightSync(
        _make_transport(args),
        token=read_env().engine_token,
        verify=args.check_weight_update_equal,
        model=_model_facts(args),
        probe=LivenessProbe.of(args),
    )


def serving_dtype(args: Args) -> torch.dtype:
    """Return the dtype in which engines hold the weights and in which they are sent."""
    name = args.sglang_dtype if args.sglang_dtype not in (None, "auto") else args.precision
    return _DTYPES[name]


def named_engines(args: Args) -> list[EngineInfo]:
    """Return the engines of --rollout-external-engine-addrs, for updates outside a run.

    With the tensor transport they use the trainer's devices, in the order of their addresses.
    """
    urls = [engine_url(address) for address in args.rollout_external_engine_addrs or ()]
    if not urls:
        raise UserError("no engines to update: name them with --rollout-external-engine-addrs")
    devices = gather_from_ranks(device_id())
    free = iter(devices)  # on CPUs there may be more engines than ranks, on the same device
    ranks = range(args.rollout_num_gpus_per_engine)
    places = [tuple(next(free, devices[-1]) for _ in ranks) for _ in urls]
    kind = args.rollout_engine
    return [EngineInfo(url=u, device_ids=p, kind=kind) for u, p in zip(urls, places, strict=True)]


class WeightSync:
    """One per trainer rank, kept for the whole run; all ranks call `update` together.

    Any failure is raised on every rank. The engines then stay paused: some of them hold parts of two
    versions, and must not generate with them.
    """

    def __init__(
        self,
        transport: WeightTransport,
        *,
        token: str | None,
        verify: bool = True,
        model: ModelFacts | None = None,
        probe: LivenessProbe | None = None,
    ) -> None:
        """`model.fp8` is the FP8 format in which engines hold matrices, if they do."""
        self.transport, self._model = transport, model or ModelFacts()
        self._token, self._verify = token, verify
        self._probe = probe or LivenessProbe()
        self._rank_devices: list[str] = []
        remove_stale_segments()

    def update(
        self, buckets: Iterable[HFTensors], engines: list[EngineInfo], version: int
    ) -> SyncReport:
        """Send all buckets to all engines as `version`.

        `buckets` may gather tensors from all ranks, so all ranks iterate together. A CastBucket
        is cast into the buffer of the transport, which saves a copy.
        """
        started = time.perf_counter()
        self._checksum_seconds = 0.0
        kinds = {info.kind for info in engines}
        self._sent = SentWeights(with_checksums=self._verify and "slime" in kinds)
        self._sglang: SGLangCheck | None = None
        clients = [EngineClient(info, self._token, self._probe) for info in engines]
        fp8 = self._model.fp8
        if fp8 is not None:
            chosen = self._model.quantizes
            buckets = (list(quantize_all(bucket, fp8, chosen)) for bucket in buckets)
        try:
            nbytes, num_buckets = self._transfer(buckets, clients, version)
            with on_all_ranks("finishing the update"):
                if own_rank() == 0:
                    for client in clients:
                        client.nbytes = nbytes
                    self._commit(clients, version)
        except BaseException:
            self.transport.close()
            # Close the sessions, so that a later update can start over; generation stays paused.
            call_all(clients, EngineClient.abort_session)
            raise
        else:
            self.transport.close()
        finally:
            collect_exports()  # engines closed the shared buffers with their sessions
            for client in clients:
                client.close()
        report = SyncReport(
            version=version,
            nbytes=nbytes,
            num_tensors=len(self._sent),
            num_buckets=num_buckets,
            num_engines=len(engines),
            seconds=time.perf_counter() - started,
            checksum_seconds=self._checksum_seconds,
        )
        if own_rank() == 0:
            logger.info("%s", report)
        return report

    def _transfer(
        self, buckets: Iterable[HFTensors], clients: list[EngineClient], version: int
    ) -> tuple[int, int]:
        """Send every bucket to every engine; return the number of bytes and of buckets."""
        mine = self._engines_served(clients)
        nbytes, index = 0, -1
        with on_all_ranks("preparing the engines"):
            sessions = self._prepare(clients, mine, version)
        bucket: Bucket | None = None
        for index, tensors in enumerate(buckets):
            if index == 0:  # built while engines pause; no rank may send before they have paused
                with on_all_ranks("preparing the engines"):
                    bucket = self._build(index, tensors, to_engines=bool(mine))
                    call_all(sessions, lambda wait: wait())
            with on_all_ranks(f"bucket {index}"):
                bucket = bucket or self._build(index, tensors, to_engines=bool(mine))
                self._send(bucket, to_engines=bool(mine))
                nbytes += bucket.nbytes
            bucket = None
            del tensors  # both freed before the next ones are gathered
        if index < 0:
            raise WeightSyncError("there are no weights to send")
        with on_all_ranks(f"bucket {index}"):
            if mine:
                self.transport.finish()
        return nbytes, index + 1

    def _prepare(
        self, clients: list[EngineClient], mine: list[EngineClient], version: int
    ) -> list[Callable[[], None]]:
        """Start opening sessions; return the functions that wait until the engines are ready."""
        sessions: list[Callable[[], None]] = []
        if own_rank() == 0:
            sessions = call_all(clients, EngineClient.start_session)
            sglang = [engine for engine in clients if engine.info.kind == "sglang"]
            if self._verify and sglang:
                self._sglang = SGLangCheck(sglang, self._model)
        if mine:
            self.transport.open(mine, version)
        return sessions

    def _build(self, index: int, tensors: HFTensors, *, to_engines: bool) -> Bucket:
        """Return the bucket to send, cast into the buffer of the transport if it must be cast."""
        if to_engines:
            self.transport.reclaim()
        if isinstance(tensors, CastBucket):
            in_buffer = to_engines and tensors.must_be_cast
            tensors = tensors.cast(self.transport.allocate(tensors.nbytes) if in_buffer else None)
        detached = [(name, t.detach() if t.requires_grad else t) for name, t in tensors]
        return Bucket(index=index, tensors=detached)

    def _send(self, bucket: Bucket, *, to_engines: bool) -> None:
        if to_engines:
            self.transport.send(bucket)
        if own_rank() == 0:  # while the engines copy it
            with self._checksum_time():
                self._sent.add(bucket)
                if self._sglang is not None:
                    for name, tensor in bucket.tensors:
                        self._sglang.add(name, tensor)

    def _commit(self, clients: list[EngineClient], version: int) -> None:
        commits = [engine.start_commit(with_checksums=self._verify) for engine in clients]
        with self._checksum_time():
            sent = self._sent.checksums()  # while the engines compute theirs
            held = call_all(commits, lambda wait: wait())
        check_versions(clients, held, version)
        if self._verify:
            check_checksums(clients, held, sent, version)
            if self._sglang is not None:
                with self._checksum_time():
                    self._sglang.compare(version)
        resumed = [engine.start_resume() for engine in clients]
        self.transport.close()  # while the engines resume
        call_all(resumed, lambda wait: wait())

    @contextlib.contextmanager
    def _checksum_time(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._verify:
            self._checksum_seconds += time.perf_counter() - started

    def _engines_served(self, clients: list[EngineClient]) -> list[EngineClient]:
        if not self.transport.shares_device:
            return clients if own_rank() == 0 else []
        if not self._rank_devices:
            self._rank_devices = gather_from_ranks(device_id())
        return [
            engine
            for engine in clients
            if serving_rank(engine.info, self._rank_devices) == own_rank()
        ]


def serving_rank(engine: EngineInfo, rank_devices: list[str]) -> int:
    """Return the first trainer rank on a device of the engine; on CPUs the first one of its node."""
    for rank, device in enumerate(rank_devices):
        if device in engine.device_ids:
            return rank
    raise WeightSyncError(
        f"engine {engine.url} is on {', '.join(engine.device_ids)}, which has no trainer rank: use "
        "--colocate, or --update-weight-transport distributed"
    )


def _make_transport(args: Args) -> WeightTransport:
    if args.update_weight_transport == "tensor":
        sglang = args.rollout_engine == "sglang"
        return (SGLangTensorTransport if sglang else TensorTransport)(current_device())
    if args.update_weight_transport == "disk":
        keep = args.update_weight_disk_keep_files
        return DiskTransport(args.update_weight_disk_dir, args.hf_checkpoint, keep_files=keep)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    return DistributedTransport(host=own_host(), backend=collective_backend(), timeout=timeout)


def _model_facts(args: Args) -> ModelFacts:
    """Read config.json for SGLang, which serves FP8 as it is; the embedded engine dequantizes it."""
    if args.rollout_engine != "sglang":
        return ModelFacts()
    folder = Path(args.hf_checkpoint)
    config = json.loads((folder / "config.json").read_text())
    facts = model_facts(config)
    if facts.fp8 is None:
        return facts
    return replace(facts, quantizes=quantized_in(folder, config, facts.fp8))


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def own_rank() -> int:
    """Return the rank of this trainer process; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather_from_ranks(value: str | None) -> list:
    """Return the value of every rank; a collective call."""
    if not _several_ranks():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def on_all_ranks(stage: str) -> Iterator[None]:
    """Raise a failure of one rank on all ranks, so that none waits forever in a collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    texts = gather_from_ranks(None if failure is None else f"{type(failure).__name__}: {failure}")
    if isinstance(failure, (WeightSyncError, WeightMismatchError)):
        raise failure
    if failure is not None:
        raise WeightSyncError(f"weight update failed at {stage}: {failure}") from failure
    for rank, text in enumerate(texts):
        if text is not None:
            # The driver sees the error of any rank, and must not retry after a mismatch.
            mismatch = text.startswith(WeightMismatchError.__name__)
            kind = WeightMismatchError if mismatch else WeightSyncError
            raise kind(f"weight update failed on trainer rank {rank}: {text}")
