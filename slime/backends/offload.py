"""Offload the storage of GPU tensors to host memory and back, without replacing the tensors.

Gradients are not offloaded but dropped: they are not read between two rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slime.utils.device import device_type


class Offloaded:
    """Contents of tensors in pinned host memory while their GPU storage is resized to 0.

    Only storages are resized, so that parameters, their views and optimizer state keep pointing at
    them. CPU tensors are skipped, since offloading them frees no GPU memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.is_cuda
        }
        self._kept = [
            (s, torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage())
            for s in storages.values()
            if s.nbytes()
        ]
        for storage, copy in self._kept:
            copy.copy_(storage, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
            for storage, _ in self._kept:
                storage.resize_(0)
        return_unused()

    @property
    def nbytes(self) -> int:
        """Bytes of pinned host memory in use, before the allocator's rounding."""
        return sum(copy.nbytes() for _, copy in self._kept)

    def restore(self) -> None:
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        self._kept = []


def return_unused() -> None:
    """Release torch's cached GPU memory, so that other processes can allocate it."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()
