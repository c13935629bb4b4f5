"""Update the adapter of engines and leave their base weights alone.

An adapter is one bucket: tens of megabytes. Every engine reports what it holds afterwards, and an
update fails unless each one reports all modules of the trainer, and the checksum of their matrices::

    pause ─▶ load ─▶ modules, checksum and version equal? ─▶ resume
                                    └─ no: engines stay paused, the error names the difference
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.config.env import read_env
from slime.config.lora import ADAPTER, LORA_A, PEFT_PREFIX, LoraConfig
from slime.core.errors import WeightMismatchError, WeightSyncError
from slime.core.types import EngineInfo, SyncReport
from slime.utils.concurrency import call_all
from slime.utils.sync_http import HttpError
from slime.weights.buckets import Bucket, HFTensors, NamedTensor, pack
from slime.weights.checksum import format_checksum, tensor_checksums
from slime.weights.engine_client import EngineClient, LivenessProbe, transfer_timeout_s
from slime.weights.ipc import SharedBuffer, collect_exports
from slime.weights.lora import write_peft_folder

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

_SHOWN = 3  # names in a message


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """One version of an adapter: whole tensors by Hugging Face name, in the engines' dtype."""

    lora: LoraConfig
    base: str
    tensors: list[NamedTensor]
    name: str = ADAPTER

    @cached_property
    def modules(self) -> list[str]:
        return [name.removesuffix(LORA_A) for name, _ in self.tensors if name.endswith(LORA_A)]

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(index=0, tensors=[(PEFT_PREFIX + n, t.detach()) for n, t in self.tensors])

    @cached_property
    def checksum(self) -> str:
        """The sum of the checksums of all tensors, under the names by which engines hold them."""
        return format_checksum(sum(tensor_checksums(self.bucket.tensors).values()) % 2**64)

    @property
    def peft_config(self) -> dict[str, Any]:
        return self.lora.to_peft(self.base, self.modules)


class AdapterSync:
    """Sends adapters through shared memory or, with `folder`, through PEFT folders below it."""

    def __init__(
        self,
        *,
        token: str | None,
        device: torch.device | None = None,
        folder: str | None = None,
        pause_mode: str = "retract",
        probe: LivenessProbe | None = None,
    ) -> None:
        self._token, self._device, self._folder = token, device or torch.device("cpu"), folder
        self._pause_mode, self._probe = pause_mode, probe or LivenessProbe()

    def update(self, adapter: AdapterUpdate, engines: list[EngineInfo], version: int) -> SyncReport:
        """Give the adapter to these engines; raise unless each holds and applies all of it."""
        started = time.perf_counter()
        clients = [EngineClient(info, self._token, self._probe) for info in engines]
        try:
            call_all(clients, self._pause)
            with self._payloads(adapter, version) as payload:
                replies = call_all(clients, lambda engine: self._load(engine, payload(), adapter))
            check_adapters(clients, replies, adapter, version)
            call_all(clients, lambda engine: engine.start_resume()())
        finally:
            collect_exports()
            for client in clients:
                client.close()
        report = SyncReport(
            version=version,
            nbytes=adapter.bucket.nbytes,
            num_tensors=len(adapter.tensors),
            num_buckets=1,
            num_engines=len(engines),
            seconds=time.perf_counter() - started,
            checksum_seconds=0.0,
        )
        logger.info("%s", report)
        return report

    def _pause(self, engine: EngineClient) -> None:
        engine.post("/pause_generation", {"mode": self._pause_mode})

    def _load(self, engine: EngineClient, payload: dict[str, Any], adapter: AdapterUpdate) -> Any:
        route = "/load_lora_adapter" + ("" if self._folder else "_from_tensors")
        try:
            return engine.post(route, payload, transfer_timeout_s(adapter.bucket.nbytes))
        except HttpError as error:
            text = f"adapter {adapter.name} did not arrive: engine {engine.url}: {error}"
            raise WeightSyncError(text) from error

    @contextmanager
    def _payloads(self, adapter: AdapterUpdate, version: int) -> Iterator[Any]:
        """Give a function that returns the body for one more engine."""
        common = {"lora_name": adapter.name, "weight_version": str(version)}
        if self._folder is not None:
            path = Path(self._folder) / f"adapter_{version:07d}"
            write_peft_folder(str(path), adapter.lora, adapter.base, adapter.tensors)
            yield lambda: {**common, "lora_path": str(path.resolve())}
            return
        buffer = SharedBuffer(adapter.bucket.packed_nbytes, self._device)
        try:
            metadata = pack(adapter.bucket, buffer.tensor)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            config = {"config_dict": adapter.peft_config, "load_format": "slime_shm"}
            yield lambda: {**common, **config, "metadata": metadata, "handle": buffer.export()}
        finally:
            buffer.close()


def make_adapter_sync(args: Args) -> AdapterSync:
    """Adapters are small: they go through host memory also where weights would not."""
    disk = args.update_weight_transport == "disk"
    return AdapterSync(
        token=read_env().engine_token,
        folder=args.update_weight_disk_dir if disk else None,
        probe=LivenessProbe(
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
        ),
    )


def check_adapters(
    engines: list[EngineClient], replies: list[Any], adapter: AdapterUpdate, version: int
) -> None:
    """Raise unless every engine has bound every module and holds the bits that were sent."""
    refused = [
        f"engine {engine.url}: {reply}"
        for engine, reply in zip(engines, replies, strict=True)
        if not (isinstance(reply, dict) and reply.get("success") is True)
    ]
    if refused:
        raise WeightSyncError(f"adapter {version} was refused. {'; '.join(refused)}")
    wrong = [
        f"engine {engine.url}: {problem}"
        for engine, reply in zip(engines, replies, strict=True)
        if (problem := _difference(adapter, reply, version))
    ]
    if wrong:
        raise WeightMismatchError(f"adapter {version} did not arrive intact. {'; '.join(wrong)}")


def _difference(adapter: AdapterUpdate, reply: dict[str, Any], version: int) -> str:
    sent, bound = set(adapter.modules), set(reply.get("bound_modules") or ())
    if sent != bound:
        return (
            f"{len(bound & sent)} of {len(sent)} modules are bound{_named('unbound', sent - bound)}"
            f"{_named('not sent', bound - sent)}"
        )
    if reply.get("checksum") != adapter.checksum:
        return f"checksum {reply.get('checksum')}, sent was {adapter.checksum}"
    held = reply.get("weight_version")
    return "" if held == str(version) else f"it reports version {held}"


def _named(what: str, names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"; {what}: {', '.join(found[:_SHOWN])}{more}" if found else ""


def adapter_update(
    lora: LoraConfig, base: str, tensors: HFTensors, dtype: torch.dtype
) -> AdapterUpdate:
    """Return an update of these adapters, cast to the dtype in which engines hold theirs."""
    cast = [(name, tensor.detach().to(dtype)) for name, tensor in tensors]
    return AdapterUpdate(lora=lora, base=base, tensors=cast)
