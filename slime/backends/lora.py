"""What both trainers do with LoRA adapters: send them to engines and compare their base."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
import torch.distributed as dist

from slime.backends.backend import HFBucket
from slime.backends.base import TrainRayActor
from slime.config.checks.model_types import has_tower
from slime.config.lora import LoraConfig, served_adapter
from slime.config.peft_files import nested_name
from slime.core.errors import UserError
from slime.core.types import EngineInfo, SyncReport
from slime.runlog.export_folder import ExportInfo
from slime.weights.adapter_update import AdapterUpdate
from slime.weights.buckets import NamedTensor
from slime.weights.lora_sync import BASE_VERSION, AdapterSync, make_adapter_sync
from slime.weights.peft_folder import write_peft_folder
from slime.weights.sync import serving_dtype


class LoraTrainRayActor(TrainRayActor):
    """A trainer with LoRA support: engines receive the adapters alone, or merged weights."""

    def whole_adapters(self, dtype: torch.dtype) -> Iterable[NamedTensor]:
        """Return full adapters by Hugging Face name; all ranks must iterate together."""
        raise TypeError(f"{type(self).__name__} trains no adapters")

    def sent_adapters(self, dtype: torch.dtype) -> Iterable[NamedTensor]:
        """Return the adapters for engines; tensors that need no gather may have another dtype."""
        return self.whole_adapters(dtype)

    def base_buckets(self) -> Iterable[HFBucket]:
        """Return the buckets of `hf_buckets` without merged adapters."""
        raise TypeError(f"{type(self).__name__} trains no adapters")

    def export_adapter(self, path: str, lora: LoraConfig, info: ExportInfo | None = None) -> None:
        """Write a PEFT folder on rank 0, whose base is --hf-checkpoint.

        Names are those of the trained model: nested if it has a vision tower.
        """
        adapters = list(self.whole_adapters(torch.float32))
        if has_tower(self.args):
            adapters = [(nested_name(name), tensor) for name, tensor in adapters]
        if self.rank == 0:
            write_peft_folder(path, lora, self.args.hf_checkpoint, adapters, info)
        dist.barrier()

    def send_weights(self, engines: list[EngineInfo], version: int) -> SyncReport:
        """With LoRA send only the adapter, after the base if an engine holds a different one."""
        lora = LoraConfig.of(self.args)
        if lora is None or served_adapter(self.args) is None:
            return super().send_weights(engines, version)
        if missing := self._adapter_sync.without_base(engines):
            self.weight_sync.update(self.base_buckets(), missing, BASE_VERSION)
        dtype = serving_dtype(self.args)
        update = AdapterUpdate(lora, self.args.hf_checkpoint, self.sent_adapters(dtype), dtype)
        return self._adapter_sync.update(update, engines, version)

    @cached_property
    def _adapter_sync(self) -> AdapterSync:
        return make_adapter_sync(self.args)


def refuse_other_base_weights(
    saved: dict[str, str] | None, held: dict[str, str], path: object
) -> None:
    """Raise if the base's values differ; in different dtypes they cannot be compared."""
    saved = saved or {}
    if saved.get("dtype") == held["dtype"] and saved.get("checksum") != held["checksum"]:
        raise UserError(
            f"{path} holds adapters of another base: they were trained on {saved.get('path')}, whose "
            "weights differ from those of this run: give that base with --hf-checkpoint"
        )
