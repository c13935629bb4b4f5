"""The adapters of an engine by name: slot, version and bound modules of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from slime.config.peft_files import PeftSettings, bound_modules, flat_name
from slime.core.errors import ConfigError, UserError
from slime.engine.arguments import EngineArgs
from slime.engine.lora.bank import LoraBank
from slime.engine.lora.in_place import InPlaceUpdate, KeptBuffer, LayoutUnknown, bound_digest
from slime.engine.lora.peft_format import (
    LoraPair,
    pair_tensors,
    parse_config,
    read_config,
    read_tensors,
    tensor_name,
)
from slime.engine.scheduler.sampling_params import RequestError
from slime.weights.checksum import format_checksum, joined_checksum, tensor_checksums

FROM_TENSORS = "__tensor__"  # path of an adapter sent as tensors, as in SGLang
_LONGEST_NAME = 512
_DEFAULT_RANK = 64
_cache_keys = itertools.count(1)


@dataclass(kw_only=True, eq=False)
class Adapter:
    """One adapter in its slot; an update changes it in place, for running requests too.

    `cache_key` separates its pages in the prefix cache from those of other adapters and earlier versions.
    """

    name: str
    slot: int
    path: str = ""
    version: str = ""
    config: PeftSettings = field(default_factory=lambda: PeftSettings(rank=1, alpha=1))
    modules: dict[str, str] = field(
        default_factory=dict
    )  # name in PEFT's file -> name in the model
    cache_key: int = 0
    in_place: InPlaceUpdate | None = None  # from a trainer's buffer that is still open

    def forget_buffer(self) -> None:
        if self.in_place is not None:
            self.in_place.close()
            self.in_place = None


class AdapterStore:
    def __init__(self, bank: LoraBank) -> None:
        self.adapters: dict[str, Adapter] = {}
        self._bank = bank
        self._free = list(range(bank.num_slots - 1, -1, -1))

    def find(self, name: str) -> Adapter:
        if name not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise RequestError(f"LoRA adapter {name[:100]!r} is not loaded; loaded are: {known}")
        return self.adapters[name]

    def load_folder(self, name: str, folder: str, version: str) -> Adapter:
        given, pairs = read_config(folder), pair_tensors(read_tensors(folder))
        return self._put(name, parse_config(given, pairs), pairs, folder, version)

    def load_tensors(
        self, name: str, config: Any, tensors: dict[str, torch.Tensor], version: str
    ) -> Adapter:
        pairs = pair_tensors(tensors)
        return self._put(name, parse_config(config, pairs), pairs, FROM_TENSORS, version)

    def load_kept(self, name: str, config: Any, buffer: KeptBuffer, version: str) -> Adapter:
        """Load an adapter from a buffer, which stays open for `update_in_place`."""
        try:
            adapter = self.load_tensors(name, config, buffer.views(), version)
            adapter.in_place = InPlaceUpdate(
                self._bank,
                buffer,
                slot=adapter.slot,
                rank=adapter.config.rank,
                modules=adapter.modules,
            )
        except BaseException:
            buffer.close()
            raise
        return adapter

    def update_in_place(self, name: str, layout: str, version: str) -> Adapter:
        """Copy the adapter from the buffer of this layout again; raise LayoutUnknown if that is impossible."""
        adapter = self.adapters.get(name)
        update = None if adapter is None else adapter.in_place
        if adapter is None or update is None or update.layout != layout or not update.is_current():
            raise LayoutUnknown(f"no buffer of this layout is open for adapter {name[:100]!r}")
        adapter.version, adapter.cache_key = version, next(_cache_keys)
        update.copy()
        return adapter

    def forget_buffers(self) -> None:
        """Close the buffers of trainers, so that no view keeps the memory of the slots from being released."""
        for adapter in self.adapters.values():
            adapter.forget_buffer()

    def _put(
        self, name: str, config: PeftSettings, pairs: dict[str, LoraPair], path: str, version: str
    ) -> Adapter:
        """Load or overwrite the adapter of this name; nothing is written unless all of it fits."""
        if not name or len(name) > _LONGEST_NAME:
            raise RequestError(f"the name of an adapter must have 1 to {_LONGEST_NAME} characters")
        try:
            sites = bound_modules(pairs, config.parameters)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        sites = {module: flat_name(site) for module, site in sites.items()}
        if len(set(sites.values())) < len(sites):
            raise RequestError("the adapter has matrices of one module under two names")
        pairs = {sites[module]: pair for module, pair in pairs.items()}
        self._bank.check(config, pairs)
        adapter = self.adapters.get(name)
        if adapter is None:
            if not self._free:
                raise RequestError(
                    f"all {self._bank.num_slots} slots are taken: unload an adapter, or start the "
                    "engine with a larger --max-loras-per-batch"
                )
            adapter = Adapter(name=name, slot=self._free.pop())
        adapter.forget_buffer()
        self._bank.write(adapter.slot, config, pairs)
        adapter.path, adapter.version, adapter.config = path, version, config
        adapter.modules, adapter.cache_key = sites, next(_cache_keys)
        self.adapters[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        adapter = self.find(name)
        adapter.forget_buffer()
        del self.adapters[name]
        self._bank.clear(adapter.slot)
        self._free.append(adapter.slot)

    def checksums(self, name: str) -> dict[str, int]:
        """Return the checksums of the matrices in the adapter's slot, under PEFT's names."""
        return tensor_checksums(self._held(name))

    def report(self, adapter: Adapter) -> dict[str, Any]:
        """Return digest and checksum of the adapter, read back from its slot, for the trainer to compare."""
        update = adapter.in_place
        if update is None:
            digest = bound_digest(self._bank, adapter.slot, adapter.modules)
            total = joined_checksum(self._held(adapter.name))
        else:
            digest, total = update.digest, update.checksum()
        return {
            "num_modules": len(adapter.modules),
            "bound_digest": digest,
            "checksum": format_checksum(total),
            "weight_version": adapter.version,
        }

    def _held(self, name: str) -> list[tuple[str, torch.Tensor]]:
        adapter = self.find(name)
        named: list[tuple[str, torch.Tensor]] = []
        for module, site in adapter.modules.items():
            pair = self._bank.read(adapter.slot, site)
            named += [(tensor_name(module, "A"), pair.a), (tensor_name(module, "B"), pair.b)]
        return named

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the loaded adapters, for /server_info."""
        return {
            name: {
                "path": adapter.path,
                "version": adapter.version,
                "slot": adapter.slot,
                "rank": adapter.config.rank,
                "alpha": adapter.config.alpha,
                "scale": adapter.config.scaling,
                "num_modules": len(adapter.modules),
            }
            for name, adapter in self.adapters.items()
        }


def make_bank(args: EngineArgs, model: PreTrainedModel) -> LoraBank | None:
    """Return the adapter slots given by the options; None if the engine serves only the base model."""
    if not args.serves_lora:
        return None
    configs = list(_configs(args.lora_paths))
    rank = args.max_lora_rank or max((config.rank for config in configs), default=_DEFAULT_RANK)
    given = args.lora_target_modules
    experts = {name.rpartition(".")[2] for config in configs for name in config.parameters}
    return LoraBank(
        model,
        num_slots=args.max_loras_per_batch,
        rank=rank,
        targets=() if "all" in given else given,
        experts={*given, *experts},
    )


def make_store(args: EngineArgs, bank: LoraBank | None) -> AdapterStore | None:
    """Return a store with the adapters of --lora-path; None without slots."""
    if bank is None:
        return None
    store = AdapterStore(bank)
    for name, folder in args.lora_paths:
        try:
            store.load_folder(name, folder, args.weight_version)
        except RequestError as error:
            raise UserError(f"--lora-path {name}={folder}: {error}") from error
    return store


def _configs(paths: Iterable[tuple[str, str]]) -> Iterable[PeftSettings]:
    for name, folder in paths:
        try:
            yield parse_config(read_config(folder))
        except RequestError as error:
            raise UserError(f"--lora-path {name}={folder}: {error}") from error
