"""Weight updates by scripts that drive them: the base class, and updates of engines on other devices.

In a run `slime/weights/sync.py` chooses the transport, and the actor's `hf_buckets` are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from slime.backends.megatron_utils.hf_weights.export import hf_buckets
from slime.backends.megatron_utils.hf_weights.families import weight_map
from slime.backends.megatron_utils.model_config import read_config
from slime.backends.megatron_utils.parallel import unwrapped
from slime.core.types import EngineInfo, SyncReport
from slime.weights.buckets import NamedTensor
from slime.weights.sync import make_weight_sync, named_engines

if TYPE_CHECKING:
    from slime.config.arguments import Args

Weights = Mapping[str, torch.Tensor]
WeightsGetter = Callable[[], Weights | Sequence[Weights]]


class UpdateWeight:
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
        """Choose other engines than those of --rollout-external-engine-addrs."""
        self._engines = engines

    def update_weights(self) -> SyncReport:
        """Send the weights as the next version; raise WeightMismatchError if an engine's differ."""
        self._engines = self._engines or named_engines(self.args)
        self.weight_version += 1
        return self._sync.update(self.buckets(), self._engines, self.weight_version)

    def buckets(self) -> Iterator[list[NamedTensor]]:
        """Yield lists of (Hugging Face name, full tensor), empty on ranks that do not send."""
        return hf_buckets(self.args, self._sources(), self._weights)

    def _sources(self) -> list[Any]:
        if self._getter is None:
            return self._chunks
        states = self._getter()
        states = [states] if isinstance(states, Mapping) else list(states)
        return [_WithState(c, s) for c, s in zip(self._chunks, states, strict=True)]


class UpdateWeightFromDistributed(UpdateWeight):
    """Broadcast over NCCL or gloo to engines on other devices."""

    transport = "distributed"


class _WithState:
    """A model chunk with another state dict."""

    def __init__(self, chunk: torch.nn.Module, state: Weights) -> None:
        self._chunk, self._state = unwrapped(chunk), state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def state_dict(self, **_: object) -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): tensor for name, tensor in self._state.items()}
