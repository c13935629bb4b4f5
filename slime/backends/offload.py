"""Give the GPU memory of tensors away and take it back, without replacing the tensors.

Gradients have no part in it: between the steps of two rollouts nobody reads them, so they are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slime.utils.device import device_type


class Offloaded:
    """Contents of tensors, kept in pinned host memory while their GPU storage is empty.

    Only storages are emptied: parameters, views of them and optimizer state keep pointing at
    them. CPU tensors are left alone, as there is nothing to gain.
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
        """Of host memory that is held for it, which the allocator may have rounded up."""
        return sum(copy.nbytes() for _, copy in self._kept)

    def restore(self) -> None:
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        self._kept = []


def return_unused() -> None:
    """Memory that torch keeps for later goes back to the GPU, where another process may take it."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()
