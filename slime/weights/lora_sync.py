"""Update the adapter of engines and leave their base weights alone.

An adapter is one bucket: tens of megabytes. Every engine reports what it holds afterwards, and an
update fails unless each one reports all modules of the trainer, and the checksum of their matrices::

    pause ─▶ load ─▶ modules, checksum and version equal? ─▶ resume
                                    └─ no: engines stay paused, the error names the difference
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.config.env import read_env
from slime.config.lora import ADAPTER, LORA_A, PEFT_PREFIX, LoraConfig
from slime.core.errors import WeightMismatchError, WeightSyncError
from slime.core.types import EngineInfo, SyncReport
from slime.utils.addresses import own_host
from slime.utils.concurrency import call_all
from slime.utils.device import collective_backend, device_id
from slime.utils.sync_http import HttpError
from slime.weights.buckets import Bucket, HFTensors, NamedTensor, pack
from slime.weights.checksum import format_checksum, tensor_checksums
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.engine_client import EngineClient, LivenessProbe, transfer_timeout_s
from slime.weights.ipc import SharedBuffer, collect_exports
from slime.weights.lora import write_peft_folder
from slime.weights.sglang_lora import SGLangAdapters
from slime.weights.sync import gather_from_ranks, on_all_ranks, own_rank, serving_rank

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

BASE_VERSION = 0  # of the base; those of adapters are above it
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
    """One per trainer rank, kept for the whole run; all ranks call `update` together.

    Adapters go through memory of the node, sent by a rank on each engine's node; with `group` by broadcast from
    rank 0 and to SGLang in the request; with `folder` as PEFT folders below it. Any failure is raised on every
    rank, and the engines then stay paused.
    """

    def __init__(
        self,
        *,
        token: str | None,
        folder: str | None = None,
        keep_folders: bool = False,
        group: DistributedTransport | None = None,
        sends_base: bool = False,
        pause_mode: str = "retract",
        probe: LivenessProbe | None = None,
    ) -> None:
        self._token, self._folder, self._keep_folders = token, folder, keep_folders
        self._group, self._pause_mode = group, pause_mode
        self._probe = probe or LivenessProbe()
        self._rank_devices: list[str] = []
        self._sends_base = sends_base
        self._with_base: set[str] = set()  # URLs

    def without_base(self, engines: list[EngineInfo]) -> list[EngineInfo]:
        """Return the engines that must be sent the base first: each once, and again after a restart.

        An engine of the run loads the trainer's base by itself, unless --ref-load gives the trainer another.
        """
        if not self._sends_base:
            return []
        urls: list[str] = []
        with on_all_ranks("asking for the base of the engines"):
            if own_rank() == 0:
                urls = [info.url for info in engines if self._needs_base(info)]
        known = set(gather_from_ranks(" ".join(urls))[0].split())
        self._with_base |= known
        return [info for info in engines if info.url in known]

    def _needs_base(self, info: EngineInfo) -> bool:
        if info.kind != "slime":
            return False
        client = EngineClient(info, self._token, self._probe)
        try:
            held = str(client.get("/model_info")["weight_version"])
        finally:
            client.close()
        return info.url not in self._with_base or held != str(BASE_VERSION)

    def update(self, adapter: AdapterUpdate, engines: list[EngineInfo], version: int) -> SyncReport:
        """Give the adapter to these engines; raise unless each holds and applies all of it."""
        started = time.perf_counter()
        clients = [EngineClient(info, self._token, self._probe) for info in engines]
        mine = self._engines_served(clients)
        try:
            with on_all_ranks("pausing the engines"):
                if own_rank() == 0:
                    call_all(clients, self._pause)
            with on_all_ranks("the adapter"):
                if mine:
                    self._load(mine, adapter, version)
            with on_all_ranks("resuming the engines"):
                if own_rank() == 0:
                    call_all(clients, lambda engine: engine.start_resume()())
                    self._remove_old_folders(version)
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
        if own_rank() == 0:
            logger.info("%s", report)
        return report

    def _engines_served(self, clients: list[EngineClient]) -> list[EngineClient]:
        if self._folder is not None or self._group is not None:
            return clients if own_rank() == 0 else []
        if not self._rank_devices:
            self._rank_devices = gather_from_ranks(device_id())
        if len(self._rank_devices) == 1:
            return clients
        devices = self._rank_devices
        return [one for one in clients if serving_rank(one.info, devices) == own_rank()]

    def _pause(self, engine: EngineClient) -> None:
        """An SGLang server replaces an adapter only when no request uses it: those are aborted and sent again."""
        mode = "abort" if engine.info.kind == "sglang" else self._pause_mode
        engine.post("/pause_generation", {"mode": mode})

    def _load(self, engines: list[EngineClient], adapter: AdapterUpdate, version: int) -> None:
        folder = None if self._folder is None else _folder_of(self._folder, version)
        embedded = [engine for engine in engines if engine.info.kind == "slime"]
        others = [engine for engine in engines if engine.info.kind != "slime"]
        if embedded:
            check_adapters(
                embedded, self._replies(embedded, adapter, version, folder), adapter, version
            )
        if others:
            shared = self._group is None
            SGLangAdapters(adapter, version, folder=folder, shared=shared).load(others)

    def _replies(
        self,
        engines: list[EngineClient],
        adapter: AdapterUpdate,
        version: int,
        folder: Path | None,
    ) -> list[Any]:
        """Load the adapter into embedded engines; return what they say about it."""
        common: dict[str, Any] = {"lora_name": adapter.name, "weight_version": str(version)}
        if folder is not None:
            write_peft_folder(str(folder), adapter.lora, adapter.base, adapter.tensors)
            body = {**common, "lora_path": str(folder.resolve())}
            return call_all(engines, lambda engine: _load_one(engine, "", body, adapter))
        common["config_dict"] = adapter.peft_config
        if self._group is not None:
            self._group.open(engines, version)
            route = "/load_lora_adapter_from_tensors"
            return self._group.broadcast(adapter.bucket, route, load_format="slime_group", **common)
        with _in_shared_memory(adapter) as payload:
            return call_all(
                engines,
                lambda engine: _load_one(engine, "_from_tensors", {**common, **payload()}, adapter),
            )

    def _remove_old_folders(self, version: int) -> None:
        if self._folder is None or self._keep_folders:
            return
        current = _folder_of(self._folder, version)
        for path in current.parent.glob("adapter_*"):
            if path != current:
                shutil.rmtree(path, ignore_errors=True)


def _folder_of(folder: str, version: int) -> Path:
    return Path(folder) / f"adapter_{version:07d}"


def _load_one(
    engine: EngineClient, suffix: str, body: dict[str, Any], adapter: AdapterUpdate
) -> Any:
    try:
        timeout = transfer_timeout_s(adapter.bucket.nbytes)
        return engine.post(f"/load_lora_adapter{suffix}", body, timeout)
    except HttpError as error:
        text = f"adapter {adapter.name} did not arrive: engine {engine.url}: {error}"
        raise WeightSyncError(text) from error


@contextmanager
def _in_shared_memory(adapter: AdapterUpdate) -> Iterator[Callable[[], dict[str, Any]]]:
    """Copy the adapter to host memory; give a function that returns a handle for one more engine."""
    buffer = SharedBuffer(adapter.bucket.packed_nbytes, torch.device("cpu"))
    try:
        metadata = pack(adapter.bucket, buffer.tensor)
        common = {"load_format": "slime_shm", "metadata": metadata}
        yield lambda: {**common, "handle": buffer.export()}
    finally:
        buffer.close()


def make_adapter_sync(args: Args) -> AdapterSync:
    transport = args.update_weight_transport
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    return AdapterSync(
        token=read_env().engine_token,
        folder=args.update_weight_disk_dir if transport == "disk" else None,
        keep_folders=args.update_weight_disk_keep_files,
        group=DistributedTransport(host=own_host(), backend=collective_backend(), timeout=timeout)
        if transport == "distributed"
        else None,
        sends_base=bool(args.ref_load) or args.rollout_external,
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
