"""Hugging Face tensors in memory, for the weight maps of the Megatron trainer."""

import torch

from slime.core.errors import UserError


class DictReader:
    """Read tensors that are in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name).shape)

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        return self._get(name)[slices] if slices else self._get(name)

    def _get(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UserError(f"there is no tensor {name}")
        return self._tensors[name]
