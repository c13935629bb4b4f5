"""Update the adapter of engines and leave their base weights alone.

An adapter is one bucket: tens of megabytes. Every engine reports what it holds afterwards, and an
update fails unless each one reports all modules of the trainer, and the checksum of their matrices::

    pause, pack ─▶ load ─▶ modules, checksum and version equal? ─▶ resume
                                          └─ no: engines stay paused, the error names the difference
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.config.env import read_env
from slime.core.types import EngineInfo, SyncReport
from slime.utils.addresses import own_host
from slime.utils.concurrency import call_all
from slime.utils.device import collective_backend, current_device, device_id
from slime.utils.sync_http import HttpError
from slime.weights.adapter_buffer import AdapterBuffer, BufferUnknown
from slime.weights.adapter_update import AdapterUpdate, check_adapters
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.engine_client import (
    PAUSE_MODE,
    EngineClient,
    LivenessProbe,
    transfer_timeout_s,
)
from slime.weights.ipc import collect_exports
from slime.weights.peft_folder import write_peft_folder
from slime.weights.sglang_lora import SGLangAdapters
from slime.weights.sync import gather_from_ranks, on_all_ranks, own_rank, serving_rank
from slime.weights.transport import naming

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

BASE_VERSION = 0  # of the base; adapters have higher versions
_HOST = torch.device("cpu")
# A larger buffer is freed after each update: copying it takes longer than opening it.
_MAX_KEPT_BYTES = 256 << 20


class AdapterSync:
    """One per trainer rank, kept for the whole run; all ranks call `update` together.

    Adapters go through memory of the node, sent by a rank on each engine's node; with `group` by broadcast from
    rank 0 and to SGLang in the request; with `folder` as PEFT folders below it. Any failure is raised on every
    rank, and the engines then stay paused. `keep_buffer` keeps the memory that is shared with engines, and what
    both sides prepared for it, between updates.
    """

    def __init__(
        self,
        *,
        token: str | None,
        folder: str | None = None,
        keep_folders: bool = False,
        keep_buffer: bool = True,
        group: DistributedTransport | None = None,
        sends_base: bool = False,
        probe: LivenessProbe | None = None,
    ) -> None:
        self._token, self._folder, self._keep_folders = token, folder, keep_folders
        self._group = group
        self._probe = probe or LivenessProbe()
        self._rank_devices: list[str] = []
        self._sends_base = sends_base
        self._with_base: set[str] = set()  # URLs
        self._keep_buffer = keep_buffer
        self._buffer: AdapterBuffer | None = None

    def without_base(self, engines: list[EngineInfo]) -> list[EngineInfo]:
        """Return the engines that need the base first: each engine once, and again after a restart.

        Engines started by the run load the trainer's base themselves, unless --ref-load sets a different one.
        """
        if not self._sends_base:
            return []
        urls: list[str] = []
        with on_all_ranks("querying the base version of the engines"):
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
        """Send the adapter to these engines; raise unless each holds and applies all of it."""
        started = time.perf_counter()
        num_tensors = len(adapter.gathered)  # first: gathering is collective
        clients = [EngineClient(info, self._token, self._probe) for info in engines]
        mine = self._engines_served(clients)
        done = False
        try:
            with on_all_ranks("pausing the engines"):
                self._pause_and_pack(clients, mine, adapter)
            with on_all_ranks("the adapter"):
                if mine:
                    self._load(mine, adapter, version)
            with on_all_ranks("resuming the engines"):
                if own_rank() == 0:
                    call_all(clients, lambda engine: engine.start_resume()())
                    self._remove_old_folders(version)
            done = True
        finally:
            self._release_buffer(failed=not done)
            for client in clients:
                client.close()
        report = SyncReport(
            version=version,
            nbytes=adapter.nbytes,
            num_tensors=num_tensors,
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

    def _pause_and_pack(
        self, clients: list[EngineClient], mine: list[EngineClient], adapter: AdapterUpdate
    ) -> None:
        """Pack the adapter into shared memory while the engines pause."""
        paused = [self._start_pause(client) for client in clients] if own_rank() == 0 else []
        try:
            embedded = [engine for engine in mine if engine.info.kind == "slime"]
            if embedded and self._folder is None and self._group is None:
                self._pack(embedded, adapter)
        finally:
            call_all(paused, lambda wait: wait())

    def _start_pause(self, engine: EngineClient) -> Callable[[], None]:
        """Pause generation; an SGLang server aborts its requests, since it unloads only an unused adapter.

        `slime/rollout/sampling.py` sends aborted requests again.
        """
        try:
            return engine.start_pause("abort" if engine.info.kind == "sglang" else PAUSE_MODE)
        except HttpError as error:
            failure = error  # raised with those of the other engines

        def fail() -> None:
            raise failure

        return fail

    def _pack(self, engines: list[EngineClient], adapter: AdapterUpdate) -> None:
        shares = all(device_id() in engine.info.device_ids for engine in engines)
        device = current_device() if shares else _HOST
        urls = {engine.url for engine in engines}
        if self._buffer is None or not self._buffer.takes(adapter, device, urls):
            self._close_buffer()
            kept = self._keep_buffer and adapter.nbytes <= _MAX_KEPT_BYTES
            self._buffer = AdapterBuffer(adapter, device, kept=kept)
        self._buffer.fill(adapter)

    def _release_buffer(self, *, failed: bool) -> None:
        """Free a buffer that is not kept, or that an engine may still be reading after a failure."""
        if self._buffer is not None and (failed or not self._buffer.kept):
            self._close_buffer(all_alive=not failed)

    def _close_buffer(self, *, all_alive: bool = False) -> None:
        """Free the buffer; without `all_alive`, probe the engines that it was sent to.

        This update may be for other engines than the last one, and only rank 0 pauses them, so a rank does
        not otherwise know which of its engines died.
        """
        if self._buffer is not None:
            self._buffer.close((lambda url: True) if all_alive else self._answers)
            self._buffer = None
            collect_exports()

    def _answers(self, url: str) -> bool:
        try:
            self._probe.check(url)
        except HttpError:
            return False
        return True

    def _load(self, engines: list[EngineClient], adapter: AdapterUpdate, version: int) -> None:
        folder = None if self._folder is None else _folder_of(self._folder, version)
        embedded = [engine for engine in engines if engine.info.kind == "slime"]
        others = [engine for engine in engines if engine.info.kind != "slime"]
        if embedded:
            self._load_embedded(embedded, adapter, version, folder)
        if others:
            shared = self._group is None
            SGLangAdapters(adapter, version, folder=folder, shared=shared).load(others)

    def _load_embedded(
        self,
        engines: list[EngineClient],
        adapter: AdapterUpdate,
        version: int,
        folder: Path | None,
    ) -> None:
        """Load the adapter into embedded engines and compare what they report about it."""
        if self._buffer is not None:
            self._load_buffer(engines, adapter, version)
            return
        common: dict[str, Any] = {"lora_name": adapter.name, "weight_version": str(version)}
        if folder is not None:
            write_peft_folder(str(folder), adapter.lora, adapter.base, adapter.tensors)
            body = {**common, "lora_path": str(folder.resolve())}
            replies = call_all(engines, lambda engine: _load_folder(engine, body, adapter))
        else:
            assert self._group is not None, "else there is a buffer"
            self._group.open(engines, version)
            common |= {"config_dict": adapter.peft_config, "load_format": "slime_group"}
            route = "/load_lora_adapter_from_tensors"
            replies = self._group.broadcast(adapter.bucket, route, **common)
        check_adapters(engines, replies, adapter.sent(), version)

    def _load_buffer(
        self, engines: list[EngineClient], adapter: AdapterUpdate, version: int
    ) -> None:
        assert self._buffer is not None
        try:
            replies = self._buffer.load(engines, version)
        except BufferUnknown:  # an engine restarted, or released its memory
            self._close_buffer()
            self._pack(engines, adapter)
            replies = self._buffer.load(engines, version)
        check_adapters(engines, replies, self._buffer.sent(), version)

    def _remove_old_folders(self, version: int) -> None:
        if self._folder is None or self._keep_folders:
            return
        current = _folder_of(self._folder, version)
        for path in current.parent.glob("adapter_*"):
            if path != current:
                shutil.rmtree(path, ignore_errors=True)


def _folder_of(folder: str, version: int) -> Path:
    return Path(folder) / f"adapter_{version:07d}"


def _load_folder(engine: EngineClient, body: dict[str, Any], adapter: AdapterUpdate) -> Any:
    with naming(f"adapter {adapter.name}", engine):
        return engine.post("/load_lora_adapter", body, transfer_timeout_s(adapter.nbytes))


def make_adapter_sync(args: Args) -> AdapterSync:
    transport = args.update_weight_transport
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    return AdapterSync(
        token=read_env().engine_token,
        folder=args.update_weight_disk_dir if transport == "disk" else None,
        keep_folders=args.update_weight_disk_keep_files,
        keep_buffer=not args.offload_train,  # engines need the GPU memory then
        group=DistributedTransport(host=own_host(), backend=collective_backend(), timeout=timeout)
        if transport == "distributed"
        else None,
        sends_base=bool(args.ref_load) or args.rollout_external,
        probe=LivenessProbe.of(args),
    )
