"""One whole weight update, the same on every trainer rank and for every transport."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.config.env import read_env
from slime.core.errors import WeightMismatchError
from slime.core.reports import SyncReport
from slime.core.types import EngineInfo
from slime.utils.addresses import own_host
from slime.utils.device import collective_backend, current_device, device_id
from slime.weights.disk_transport import DiskTransport
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.engine_client import EngineClient, on_all
from slime.weights.fp8 import quantize_all
from slime.weights.ipc import collect_exports, remove_stale_segments
from slime.weights.liveness import Patience
from slime.weights.served import ServedCheck
from slime.weights.sglang_layout import ModelFacts, model_facts
from slime.weights.sglang_tensor import SGLangTensorTransport
from slime.weights.tensor_transport import TensorTransport
from slime.weights.transport import Bucket, WeightSyncError, WeightTransport
from slime.weights.verify import SentWeights, check_checksums, check_versions

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

HFTensors = list[tuple[str, torch.Tensor]]

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
        patience=Patience(
            look_every_s=args.rollout_health_check_interval,
            answer_s=args.rollout_health_check_timeout,
        ),
    )


def serving_dtype(args: Args) -> torch.dtype:
    """What the engines hold the weights in, and so what they must be sent in."""
    name = args.sglang_dtype if args.sglang_dtype not in (None, "auto") else args.precision
    return _DTYPES[name]


class WeightSync:
    """Kept by each trainer rank for the whole run; all ranks call `update` together.

    Any failure is raised on every rank. The engines then stay paused: some of them hold a mixture of
    two versions, and must not generate with it.
    """

    def __init__(
        self,
        transport: WeightTransport,
        *,
        token: str | None,
        verify: bool = True,
        pause_mode: str = "retract",
        model: ModelFacts | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`model.fp8`: what engines hold matrices in, where that is not what the trainer has."""
        self.transport, self._model = transport, model or ModelFacts()
        self._token, self._verify, self._pause_mode = token, verify, pause_mode
        self._patience = patience or Patience()
        self._rank_devices: list[str] = []
        remove_stale_segments()

    def update(
        self, buckets: Iterable[HFTensors], engines: list[EngineInfo], version: int
    ) -> SyncReport:
        """Send what `buckets` gives (a collective iterator: all ranks go through it) as `version`."""
        started = time.perf_counter()
        self._checksum_seconds = 0.0
        kinds = {info.kind for info in engines}
        self._sent = SentWeights(with_sums=self._verify and "slime" in kinds)
        self._served: ServedCheck | None = None
        clients = [EngineClient(info, self._token, self._patience) for info in engines]
        fp8 = self._model.fp8
        if fp8 is not None:
            buckets = (list(quantize_all(bucket, fp8)) for bucket in buckets)
        try:
            nbytes, num_buckets = self._transfer(buckets, clients, version)
            with _on_all_ranks("finishing the update"):
                if _rank() == 0:
                    for client in clients:
                        client.nbytes = nbytes
                    self._commit(clients, version)
        except BaseException:
            self.transport.close()
            self._abandon(clients)
            raise
        else:
            self.transport.close()
        finally:
            collect_exports()  # engines have closed what was shared, with their sessions
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
        if _rank() == 0:
            logger.info("%s", report)
        return report

    def room(self, nbytes: int) -> torch.Tensor | None:
        """Memory in which the next bucket can be made, which saves a copy; not every transport has any.

        To be asked for by the iterator of an update, once per bucket.
        """
        transport = self.transport
        return transport.room(nbytes) if isinstance(transport, TensorTransport) else None

    def _transfer(
        self, buckets: Iterable[HFTensors], clients: list[EngineClient], version: int
    ) -> tuple[int, int]:
        """Every bucket into every engine: bytes, buckets."""
        mine = self._engines_served(clients)
        nbytes, index = 0, -1
        with _on_all_ranks("preparing the engines"):
            sessions = self._prepare(clients, mine, version)
        for index, tensors in enumerate(buckets):
            if index == 0:  # which was made meanwhile
                with _on_all_ranks("preparing the engines"):
                    on_all(sessions, lambda wait: wait())
            bucket = Bucket(index=index, tensors=_detached(tensors))
            with _on_all_ranks(f"bucket {index}"):
                self._send(bucket, to_engines=bool(mine))
            nbytes += bucket.nbytes
            del bucket, tensors  # before the next one is gathered
        if index < 0:
            raise WeightSyncError("there are no weights to send")
        with _on_all_ranks(f"bucket {index}"):
            if mine:
                self.transport.finish()
        return nbytes, index + 1

    def _prepare(
        self, clients: list[EngineClient], mine: list[EngineClient], version: int
    ) -> list[Callable[[], None]]:
        """Starts it; what is returned waits until the engines are ready."""
        sessions: list[Callable[[], None]] = []
        if _rank() == 0:
            sessions = on_all(clients, lambda engine: engine.start_session(self._pause_mode))
            sglang = [engine for engine in clients if engine.info.kind == "sglang"]
            if self._verify and sglang:
                self._served = ServedCheck(sglang, self._model)
        if mine:
            self.transport.open(mine, version)
        return sessions

    def _send(self, bucket: Bucket, *, to_engines: bool) -> None:
        if to_engines:
            self.transport.send(bucket)
        if _rank() == 0:  # while the engines copy it
            with self._checksum_time():
                self._sent.add(bucket)
                if self._served is not None:
                    for name, tensor in bucket.tensors:
                        self._served.add(name, tensor)

    def _commit(self, clients: list[EngineClient], version: int) -> None:
        asked = [engine.start_commit(with_sums=self._verify) for engine in clients]
        with self._checksum_time():
            sent = self._sent.checksums()  # while the engines sum theirs
            held = on_all(asked, lambda wait: wait())
        check_versions(clients, held, version)
        if self._verify:
            check_checksums(clients, held, sent, version)
            if self._served is not None:
                with self._checksum_time():
                    self._served.compare(version)
        resumed = [engine.start_resume() for engine in clients]
        self.transport.close()  # meanwhile
        on_all(resumed, lambda wait: wait())

    def _abandon(self, clients: list[EngineClient]) -> None:
        """Close the sessions, so that a later update can start over; generation stays paused."""
        on_all(clients, EngineClient.abandon)

    @contextlib.contextmanager
    def _checksum_time(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._verify:
            self._checksum_seconds += time.perf_counter() - started

    def _engines_served(self, clients: list[EngineClient]) -> list[EngineClient]:
        if not self.transport.shares_device:
            return clients if _rank() == 0 else []
        if not self._rank_devices:
            self._rank_devices = _gather(device_id())
        return [
            engine for engine in clients if serving_rank(engine.info, self._rank_devices) == _rank()
        ]


def serving_rank(engine: EngineInfo, rank_devices: list[str]) -> int:
    """The first trainer rank on a device of the engine; on CPUs the first one of its node."""
    for rank, device in enumerate(rank_devices):
        if device in engine.device_ids:
            return rank
    raise WeightSyncError(
        f"engine {engine.url} is on {', '.join(engine.device_ids)}, where no trainer rank is; sharing "
        "memory needs --colocate, else use --update-weight-transport distributed"
    )


def _make_transport(args: Args) -> WeightTransport:
    if args.update_weight_transport == "tensor":
        sglang = args.rollout_engine == "sglang"
        return (SGLangTensorTransport if sglang else TensorTransport)(current_device())
    if args.update_weight_transport == "disk":
        return DiskTransport(args.update_weight_disk_dir, args.hf_checkpoint)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    return DistributedTransport(host=own_host(), backend=collective_backend(), timeout=timeout)


def _model_facts(args: Args) -> ModelFacts:
    """SGLang serves FP8 of --hf-checkpoint as it is; the embedded engine holds it unpacked."""
    if args.rollout_engine != "sglang":
        return ModelFacts()
    return model_facts(json.loads((Path(args.hf_checkpoint) / "config.json").read_text()))


def _detached(tensors: HFTensors) -> HFTensors:
    return [(name, t.detach() if t.requires_grad else t) for name, t in tensors]


def _several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(value: str | None) -> list:
    if not _several_ranks():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def _on_all_ranks(stage: str) -> Iterator[None]:
    """What fails on one rank is raised on all, so that none waits for another in a collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    texts = _gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if isinstance(failure, (WeightSyncError, WeightMismatchError)):
        raise failure
    if failure is not None:
        raise WeightSyncError(f"weight update failed at {stage}: {failure}") from failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise WeightSyncError(f"weight update failed on trainer rank {rank}: {text}")
