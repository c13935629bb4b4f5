"""Weights of frozen models in host memory, swapped into the actor's model for their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class HostWeights:
    """A copy of the chunks' weights in host memory."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._copy = _to_host(chunks)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap these weights into the chunks inside the `with`; restore the chunks' own after."""
        own = _to_host(self._chunks)
        _from_host(self._chunks, self._copy)
        try:
            yield
        finally:
            _from_host(self._chunks, own)

    def keep(self) -> None:
        """Replace the copy by the current weights of the chunks."""
        self._copy = _to_host(self._chunks)


def _weights(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


@torch.no_grad()
def _to_host(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    copies = []
    for tensor in _weights(chunks):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(copy.copy_(tensor, non_blocking=True))
    torch.cuda.synchronize()
    return copies


@torch.no_grad()
def _from_host(chunks: Sequence[torch.nn.Module], copies: list[torch.Tensor]) -> None:
    for tensor, copy in zip(_weights(chunks), copies, strict=True):
        tensor.copy_(copy, non_blocking=True)
    torch.cuda.synchronize()
