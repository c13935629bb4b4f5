"""What the parts of the weight sync hand each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from slime.core.errors import WeightSyncError as WeightSyncError
from slime.weights.engine_client import EngineClient


@dataclass(kw_only=True, frozen=True)
class Bucket:
    """Whole tensors by Hugging Face name, in the dtype the engines hold.

    `index` counts the buckets of one update from 0.
    """

    index: int
    tensors: list[tuple[str, torch.Tensor]]

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)


class WeightTransport(Protocol):
    """How buckets reach engines. Calls come as open, send..., finish, close; close also after errors."""

    shares_device: bool  # whether each engine is served by a rank on its own device, else by rank 0

    def open(self, engines: list[EngineClient], version: int) -> None:
        """Get ready to send `version` to the engines this rank serves; there is at least one."""
        ...

    def send(self, bucket: Bucket) -> None:
        """May return before the engines have the bucket; its tensors may change after the return, but
        for those that were made in memory of the transport."""
        ...

    def finish(self) -> None:
        """Return once every engine has every bucket."""
        ...

    def close(self) -> None:
        """Give back what one update needed; calling it twice does no harm."""
        ...
