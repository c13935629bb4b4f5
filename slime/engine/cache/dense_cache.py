"""A second, dense copy of the keys and values of decoding requests, for devices without a paged kernel.

Attention over pages has to gather them first, at every token of every request: on a CPU that takes
longer than attention itself. Here the requests that decode also have a row of a dense block, so that
attention reads a view. Rows are filled from the pages once, then grow token by token beside them.

    block of span 128:   row 0  request a  |####################......|   lengths 65..128
                         row 1  request b  |##############............|
                         row 2  free

A request moves to the next block when it outgrows its own; rows in use always lie at the front. The
pages stay the truth: what is here may be dropped at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.cache.kv_cache import KVCache
from slime.engine.scheduler.request import Request

_SPAN = 64  # tokens; lengths in one block differ by less than this
_FEWEST_ROWS = 8


@dataclass(kw_only=True, eq=False)
class DenseRows:
    """Rows 0..count of one block take part in a step; the new token of row i goes to `targets[i]`."""

    block: Block
    count: int
    targets: torch.Tensor  # [count] row * span + position

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.block.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, self.targets, keys)
        self.block.values[layer].view(-1, *values.shape[1:]).index_copy_(0, self.targets, values)

    def read(self, layer: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [count, kv_len, heads, dim]"""
        block = self.block
        return block.keys[layer][: self.count, :kv_len], block.values[layer][: self.count, :kv_len]


class DenseCache:
    def __init__(self, cache: KVCache, max_tokens: int) -> None:
        self._cache = cache
        self._max_tokens = max_tokens
        self._blocks: dict[int, Block] = {}
        self._places: dict[Request, tuple[Block, int]] = {}

    def place(self, requests: list[Request], page_table: np.ndarray) -> list[list[Request]]:
        """Give rows to the requests that decode in this step, and take them from all others.

        Returns the requests of each block in the order of its rows; those in none of them found no
        room and have to be attended to by their pages.
        """
        current = set(requests)
        for request in [r for r in self._places if r not in current]:
            self._remove(request)
        newcomers: dict[Block, list[Request]] = {}
        for request in requests:
            span = -(-len(request.token_ids) // _SPAN) * _SPAN
            place = self._places.get(request)
            if place is not None:
                if place[0].span == span:
                    continue
                self._remove(request)
            block = self._block_with_room(span)
            if block is not None:
                self._places[request] = (block, len(block.requests))
                block.requests.append(request)
                newcomers.setdefault(block, []).append(request)
        for block, new in newcomers.items():
            rows = [self._places[request][1] for request in new]
            block.fill(self._cache, new, rows, page_table)
        return [block.requests for block in self._blocks.values() if block.requests]

    def rows(self, requests: list[Request]) -> DenseRows:
        """The step's view of the block that holds exactly these requests."""
        block = self._places[requests[0]][0]
        targets = [i * block.span + len(r.token_ids) - 1 for i, r in enumerate(requests)]
        return DenseRows(block=block, count=len(requests), targets=torch.tensor(targets))

    def clear(self) -> None:
        self._blocks.clear()
        self._places.clear()

    def _remove(self, request: Request) -> None:
        """The last row takes the place of the one that goes."""
        block, row = self._places.pop(request)
        last = block.requests.pop()
        if last is not request:
            block.copy_row(len(block.requests), row)
            block.requests[row] = last
            self._places[last] = (block, row)

    def _block_with_room(self, span: int) -> Block | None:
        block = self._blocks.get(span)
        if block is None:
            block = self._blocks[span] = Block(span)
        if len(block.requests) < block.num_rows:
            return block
        num_rows = max(_FEWEST_ROWS, block.num_rows * 5 // 4)
        if not self._has_memory(num_rows * span, block):
            self._blocks = {s: b for s, b in self._blocks.items() if b.requests or b is block}
            if not self._has_memory(num_rows * span, block):
                return None
        block.grow(self._cache, num_rows)
        return block

    def _has_memory(self, num_tokens: int, block: Block) -> bool:
        others = sum(b.span * b.num_rows for b in self._blocks.values() if b is not block)
        return others + num_tokens <= self._max_tokens


class Block:
    """keys[layer] and values[layer] are [num_rows, span, heads, dim]."""

    def __init__(self, span: int) -> None:
        self.span = span
        self.num_rows = 0
        self.requests: list[Request] = []  # one per row, from row 0 on
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def grow(self, cache: KVCache, num_rows: int) -> None:
        for layer, shape in cache.layers.items():
            for store, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                # Zeros: masked positions must not be 0 x NaN.
                larger = torch.zeros(num_rows, self.span, shape.num_heads, dim, dtype=cache.dtype)
                if self.num_rows:
                    larger[: self.num_rows] = store[layer]
                store[layer] = larger
        self.num_rows = num_rows

    def copy_row(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target] = tensor[source]

    def fill(
        self, cache: KVCache, requests: list[Request], rows: list[int], page_table: np.ndarray
    ) -> None:
        """Copy what the requests have in their pages; all of them lie in the rows given."""
        size = cache.page_size
        num_pages = -(-max(request.num_computed for request in requests) // size)
        pages = torch.from_numpy(page_table[[request.row for request in requests], :num_pages])
        length = min(num_pages * size, self.span)
        for layer in cache.layers:
            for store, pool in ((self.keys, cache.keys), (self.values, cache.values)):
                pieces = pool[layer].index_select(0, pages.reshape(-1))
                pieces = pieces.view(len(requests), num_pages * size, *pieces.shape[2:])
                store[layer][rows, :length] = pieces[:, :length]
                store[layer][rows, length:] = 0  # not what the row's last owner left
