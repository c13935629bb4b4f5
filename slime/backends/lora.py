"""What both trainers do with LoRA adapters: send them to engines and compare their base."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from slime.backends.base import TrainRayActor
from slime.config.lora import LoraConfig, served_adapter
from slime.core.errors import UserError, WeightMismatchError, WeightSyncError
from slime.core.types import EngineInfo, SyncReport
from slime.weights.buckets import NamedTensor
from slime.weights.lora_sync import adapter_update, make_adapter_sync
from slime.weights.sync import serving_dtype


class LoraTrainRayActor(TrainRayActor):
    """A trainer that can train adapters; with LoRA engines are sent these alone or merged weights."""

    def whole_adapters(self, dtype: torch.dtype) -> Iterable[NamedTensor]:
        """Return full adapters by Hugging Face name; all ranks must iterate together."""
        raise TypeError(f"{type(self).__name__} trains no adapters")

    def update_weights(
        self, engines: list[EngineInfo] | None = None, version: int | None = None
    ) -> SyncReport:
        """With LoRA send the adapter alone, unless merged weights are asked for."""
        if served_adapter(self.args) is None or engines is None or version is None:
            return super().update_weights(engines, version)
        self._engines, self._version = engines, version
        return self._update_adapter(engines, version)

    def _update_adapter(self, engines: list[EngineInfo], version: int) -> SyncReport:
        lora, dtype = LoraConfig.of(self.args), serving_dtype(self.args)
        assert lora is not None, "served_adapter is None without --lora-rank"
        tensors = list(self.whole_adapters(dtype))
        update = adapter_update(lora, self.args.hf_checkpoint, tensors, dtype)
        found: list[SyncReport | Exception | None] = [None]
        if self.rank == 0:
            try:
                found = [make_adapter_sync(self.args).update(update, engines, version)]
            except (WeightSyncError, WeightMismatchError) as error:
                found = [error]
        dist.broadcast_object_list(found)
        if isinstance(found[0], Exception):
            raise found[0]
        assert found[0] is not None
        return found[0]


def refuse_other_base_weights(
    saved: dict[str, str] | None, held: dict[str, str], path: object
) -> None:
    """Raise if the base has other values; in another dtype they cannot be compared."""
    saved = saved or {}
    if saved.get("dtype") == held["dtype"] and saved.get("checksum") != held["checksum"]:
        raise UserError(
            f"{path} holds adapters of another base: they were trained on {saved.get('path')}, whose "
            "weights differ from those of this run: give that base with --hf-checkpoint"
        )
