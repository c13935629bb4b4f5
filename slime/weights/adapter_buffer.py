"""An adapter in memory that embedded engines read, kept between updates so that each costs the same few calls.

    first update    pack ─▶ handle, config, names, shapes, offsets ─▶ the engine opens the buffer and keeps it
    later ones      pack ─▶ the buffer's key and the version        ─▶ copy, read back, checksum

An engine that no longer has the buffer (it restarted, or released its memory) answers 409. A new buffer is created
then: the old one is already unlinked, so that a killed run leaves nothing in /dev/shm.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from slime.config.peft_files import PEFT_PREFIX
from slime.utils.concurrency import call_all
from slime.utils.device import current_device
from slime.utils.sync_http import HttpError
from slime.weights.adapter_update import AdapterUpdate, SentAdapter
from slime.weights.buckets import TensorMetadata, dtype_name
from slime.weights.checksum import RunningChecksums, format_checksum
from slime.weights.engine_client import EngineClient, transfer_timeout_s
from slime.weights.ipc import BufferHandle, SharedBuffer, finish_reading, release_export
from slime.weights.transport import naming

_ROUTE = "/load_lora_adapter_from_tensors"
_UNKNOWN = 409  # the engine has no such buffer


class BufferUnknown(Exception):
    """An engine no longer has the buffer open: all engines need a new one."""


class AdapterBuffer:
    """The matrices of one adapter end to end, in order of name and in one dtype.

    Without `kept`, engines and owner close the buffer after one update.
    """

    def __init__(self, adapter: AdapterUpdate, device: torch.device, *, kept: bool) -> None:
        self._facts, self._device, self.kept = _facts(adapter), device, kept
        self._key = secrets.token_hex(16)
        self._modules, self._digest = adapter.modules, adapter.digest
        self._name, self._config = adapter.name, adapter.peft_config
        self.nbytes = adapter.nbytes
        self._metadata = _metadata(adapter)
        self._joined = "\n".join(entry["name"] for entry in self._metadata)
        self._shared = SharedBuffer(self.nbytes, device)
        self._packed = self._shared.tensor  # on the device of the adapter
        if device != current_device():
            self._packed = torch.empty_like(self._shared.tensor, device=current_device())
        self._flat = self._packed.view(adapter.dtype)
        parts = self._flat.split([tensor.numel() for _, tensor in adapter.gathered])
        shapes = (tensor.shape for _, tensor in adapter.gathered)
        self._views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._sums = RunningChecksums()
        self._opened: set[str] = set()  # URLs of engines that have it open
        self._handles: dict[str, BufferHandle] = {}  # by URL of the engines that they were sent to
        self._forgotten: set[str] = set()  # URLs of engines that no longer have it open

    def takes(self, adapter: AdapterUpdate, device: torch.device, urls: set[str]) -> bool:
        """Return whether these engines have it open and it matches the adapter's names, shapes, dtype and settings."""
        return urls <= self._opened and self._device == device and self._facts == _facts(adapter)

    @torch.no_grad()
    def fill(self, adapter: AdapterUpdate) -> None:
        """Cast and copy the adapter; on a GPU in a few launches, and one copy if engines read host memory.

        When it returns, engines may read the buffer. No engine may be reading it when it is called.
        """
        sources = [tensor for _, tensor in adapter.gathered]
        torch._foreach_copy_(self._views, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
        self._sums = RunningChecksums()
        self._sums.add([(self._joined, self._flat)])
        if self._packed is not self._shared.tensor:
            self._shared.tensor.copy_(self._packed)
        finish_reading(self._packed)

    def sent(self) -> SentAdapter:
        """Return what engines must report, with the checksum that `fill` queued."""
        checksum = format_checksum(self._sums.read()[self._joined])
        return SentAdapter(modules=self._modules, digest=self._digest, checksum=checksum)

    def load(self, engines: list[EngineClient], version: int) -> list[Any]:
        """Let the engines copy the buffer as `version`; return their replies, or raise BufferUnknown."""
        is_open = bool(self._opened)
        replies = call_all(engines, lambda engine: self._load(engine, version, is_open=is_open))
        if self.kept:
            self._opened |= {engine.url for engine in engines}
            self._shared.unlink()
        return replies

    def close(self, is_alive: Callable[[str], bool]) -> None:
        """Free the memory; GPU memory is freed once every engine at a live URL has closed it too."""
        for url, handle in self._handles.items():
            if url in self._forgotten or not is_alive(url):
                release_export(handle)
        del self._views, self._flat, self._packed
        self._shared.close()

    def _load(self, engine: EngineClient, version: int, *, is_open: bool) -> Any:
        body: dict[str, Any] = {"lora_name": self._name, "weight_version": str(version)}
        if self.kept:
            body["layout"] = self._key
        if is_open:
            body["load_format"] = "slime_kept"
        else:
            body |= {"load_format": "slime_shm", "config_dict": self._config}
            handle = self._handles[engine.url] = self._shared.export()
            body |= {"metadata": self._metadata, "handle": handle}
        with naming(f"adapter {self._name}", engine):
            try:
                return engine.post(_ROUTE, body, transfer_timeout_s(self.nbytes))
            except HttpError as error:
                if is_open and error.status == _UNKNOWN:
                    self._forgotten.add(engine.url)
                    raise BufferUnknown from None
                raise


def _facts(adapter: AdapterUpdate) -> tuple[Any, ...]:
    named = adapter.gathered
    names, shapes = [name for name, _ in named], [tensor.shape for _, tensor in named]
    return adapter.name, adapter.lora, adapter.base, adapter.dtype, names, shapes


def _metadata(adapter: AdapterUpdate) -> list[TensorMetadata]:
    named, dtype = adapter.gathered, adapter.dtype
    ends = accumulate(dtype.itemsize * tensor.numel() for _, tensor in named)
    return [
        {
            "name": PEFT_PREFIX + name,
            "dtype": dtype_name(dtype),
            "shape": list(tensor.shape),
            "offset": end - dtype.itemsize * tensor.numel(),
        }
        for (name, tensor), end in zip(named, ends, strict=True)
    ]
