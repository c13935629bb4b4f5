"""Recurrent states of gated delta nets, one per row of the page table, and those saved for prefixes.

    rows    0 .. max_running - 1     running requests
            max_running              the padding row
            after it                 states at nodes of the prefix cache

A state summarizes all tokens before it in a fixed size and, unlike keys and values, cannot be truncated: a
prefix can be reused only up to a token after which the state was saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime.algorithms.delta_layers import DeltaState
from slime.algorithms.gated_delta import DeltaHeads

RESET = -1  # as the source of a copy: a state of zeros


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What the delta nets of a model store per row; `layers` are their indices in the model."""

    layers: tuple[int, ...]
    heads: DeltaHeads
    window: int  # inputs of the convolution that are kept

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row."""
        heads = self.heads
        matrices = heads.num_value * heads.key_dim * heads.value_dim * 4
        return len(self.layers) * (matrices + self.window * sum(heads.widths) * dtype.itemsize)


class StateCache:
    """`windows` [rows, layers, K - 1, C] in the model's dtype, `matrices` [rows, layers, heads, key dim,
    value dim] in fp32: all layers of a row are one block of memory, which is copied at once."""

    def __init__(
        self, shape: StateShape, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.num_rows = shape, num_rows
        self._dtype, self.device = dtype, device
        self._index = {layer: index for index, layer in enumerate(shape.layers)}
        self.windows = self.matrices = torch.empty(0)  # until `allocate`

    def allocate(self) -> None:
        shape, first = self.shape, (self.num_rows, len(self.shape.layers))
        heads, width = shape.heads, sum(shape.heads.widths)
        matrix = (heads.num_value, heads.key_dim, heads.value_dim)
        self.windows = torch.zeros(
            *first, shape.window, width, dtype=self._dtype, device=self.device
        )
        self.matrices = torch.zeros(*first, *matrix, dtype=torch.float32, device=self.device)

    def free(self) -> None:
        self.windows = self.matrices = torch.empty(0)

    def index_of(self, layer: int) -> int:
        """Return the position of a layer of the model among those with states."""
        return self._index[layer]

    def read(self, layer: int, rows: torch.Tensor) -> DeltaState:
        index = self._index[layer]
        return DeltaState(
            windows=self.windows[:, index].index_select(0, rows),
            matrices=self.matrices[:, index].index_select(0, rows),
        )

    def write(self, layer: int, rows: torch.Tensor, state: DeltaState) -> None:
        index = self._index[layer]
        self.windows[:, index].index_copy_(0, rows, state.windows)
        self.matrices[:, index].index_copy_(0, rows, state.matrices)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy rows (source, target) one after the other; the source RESET is zeros."""
        for source, target in copies:
            for tensor in (self.windows, self.matrices):
                if source == RESET:
                    tensor[target].zero_()
                else:
                    tensor[target].copy_(tensor[source])
