"""The KV cache: keys and values of every layer, in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


class KVCache:
    """keys[layer] and values[layer] are [pages, page_size, heads, dim]; gathering whole pages gives a
    sequence's keys without further copying. Page 0 is the padding page."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.allocate()

    def allocate(self) -> None:
        for index, shape in self.layers.items():
            self.keys[index] = self._pages(shape.num_heads, shape.key_dim)
            self.values[index] = self._pages(shape.num_heads, shape.value_dim)

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store one token per slot; a slot is page * page_size + offset. keys: [T, heads, dim]."""
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, slots, keys)
        self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, slots, values)

    def wipe(self, pages: list[int]) -> None:
        """Zero pages: SDPA multiplies masked positions by 0, which must not be a NaN of an earlier request."""
        index = torch.tensor(pages, device=self.device)
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor.index_fill_(0, index, 0)

    def _pages(self, num_heads: int, dim: int) -> torch.Tensor:
        # Zeros, not empty: SDPA multiplies masked positions by 0, and 0 x NaN is NaN.
        shape = (self.num_pages + 1, self.page_size, num_heads, dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
