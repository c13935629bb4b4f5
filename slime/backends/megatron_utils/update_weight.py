"""Send the weights of a Megatron model in any layout to engines, from scripts that run the update.

    updater = UpdateWeightFromDistributed(args, model, lambda: model.state_dict(), "qwen3")
    updater.connect_rollout_engines(engines)
    updater.update_weights()

Every rank creates an updater and calls it. Tensors are gathered bucket by bucket over TP, EP and PP
under Hugging Face names; versions and checksums are compared after every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.hf_weights.export import hf_buckets
from slime.backends.megatron_utils.hf_weights.families import weight_map
from slime.backends.megatron_utils.model_config import read_config
from slime.backends.megatron_utils.parallel import unwrapped
from slime.core.errors import UserError
from slime.core.types import EngineInfo, SyncReport
from slime.weights.sync import make_weight_sync, serving_dtype

if TYPE_CHECKING:
    from slime.config.arguments import Args

Weights = Mapping[str, torch.Tensor]
WeightsGetter = Callable[[], Weights | Sequence[Weights]]


class _UpdateWeight:
    transport: Literal["distributed", "tensor"]

    def __init__(
        self,
        args: Args,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        weights_getter: WeightsGetter | None = None,
        model_name: str | None = None,
    ) -> None:
        """Take weights from `weights_getter` (a state dict per model chunk) or from the model."""
        self.args = args.replace(update_weight_transport=self.transport)
        self.weight_version = 0
        self._chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._getter = weights_getter
        config = read_config(args.hf_checkpoint)
        if model_name is not None:
            config.model_type = model_name  # pyright: ignore[reportAttributeAccessIssue] - of this instance
        self._weights = weight_map(config, args)
        self._sync = make_weight_sync(self.args)
        self._engines: list[EngineInfo] = []

    def connect_rollout_engines(self, engines: list[EngineInfo]) -> None:
        self._engines = engines

    def update_weights(self) -> SyncReport:
        """Send the weights as the next version; raise WeightMismatchError if an engine's differ."""
        if not self._engines:
            raise UserError("no engines to update: call connect_rollout_engines first")
        self.weight_version += 1
        return self._sync.update(self.buckets(), self._engines, self.weight_version)

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield lists of (Hugging Face name, full tensor), empty on ranks that do not send."""
        return hf_buckets(
            self._sources(),
            self._weights,
            self.args.update_weight_buffer_size,
            dtype=serving_dtype(self.args),
            keep=dist.get_rank() == 0 or self.transport == "tensor",
        )

    def _sources(self) -> list[Any]:
        if self._getter is None:
            return self._chunks
        states = self._getter()
        states = [states] if isinstance(states, Mapping) else list(states)
        return [_WithState(c, s) for c, s in zip(self._chunks, states, strict=True)]


class UpdateWeightFromDistributed(_UpdateWeight):
    """Broadcast over NCCL or gloo to engines on other devices."""

    transport = "distributed"


class UpdateWeightFromTensor(_UpdateWeight):
    """Share tensors by CUDA IPC or shared memory with engines on the same devices."""

    transport = "tensor"


class _WithState:
    """A model chunk with another state dict."""

    def __init__(self, chunk: torch.nn.Module, state: Weights) -> None:
        self._chunk, self._state = unwrapped(chunk), state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def state_dict(self, **_: object) -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): tensor for name, tensor in self._state.items()}
