"""The dense cache under requests that come, grow, move and go: it always shows what the pages hold."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from slime.engine.cache.dense_cache import DenseCache
from slime.engine.cache.kv_cache import KVCache, LayerShape
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams

PAGE = 16
LAYERS = {
    0: LayerShape(num_heads=2, key_dim=4, value_dim=3),
    3: LayerShape(num_heads=1, key_dim=2, value_dim=2),
}


class Pages:
    """A paged cache and requests in it; token t of request r has the key r + t/1000 in every element."""

    def __init__(self, num_requests: int, max_tokens: int) -> None:
        per_request = 24
        self.cache = KVCache(
            LAYERS, num_requests * per_request, PAGE, torch.float32, torch.device("cpu")
        )
        pages = np.random.default_rng(0).permutation(num_requests * per_request) + 1
        self.table = pages.reshape(num_requests, per_request)
        self.dense = DenseCache(self.cache, max_tokens)

    def value(self, request: Request, position: int) -> float:
        return request.row + position / 1000

    def slot(self, request: Request, position: int) -> int:
        return int(self.table[request.row, position // PAGE]) * PAGE + position % PAGE

    def start(self, row: int, length: int) -> Request:
        """A request with `length` tokens of which all but the last are computed."""
        request = Request(
            rid=str(row),
            token_ids=[0] * length,
            prompt_len=length,
            params=SamplingParams(),
            seed=0,
            row=row,
        )
        request.num_computed = length - 1
        for position in range(length - 1):
            self.write(request, position)
        return request

    def write(self, request: Request, position: int) -> None:
        for layer, shape in LAYERS.items():
            keys = torch.full((1, shape.num_heads, shape.key_dim), self.value(request, position))
            values = torch.full(
                (1, shape.num_heads, shape.value_dim), -self.value(request, position)
            )
            self.cache.write(layer, torch.tensor([self.slot(request, position)]), keys, values)

    def step(self, requests: list[Request]) -> int:
        """Decode one token of each; returns how many were seated."""
        seated = 0
        for members in self.dense.place(requests, self.table):
            rows = self.dense.rows(members)
            seated += len(members)
            for layer, shape in LAYERS.items():
                new = torch.tensor([self.value(r, len(r.token_ids) - 1) for r in members])
                rows.write(
                    layer,
                    new.view(-1, 1, 1).expand(-1, shape.num_heads, shape.key_dim),
                    -new.view(-1, 1, 1).expand(-1, shape.num_heads, shape.value_dim),
                )
                keys, values = rows.read(layer, max(len(r.token_ids) for r in members))
                for i, request in enumerate(members):
                    length = len(request.token_ids)
                    expected = torch.tensor([self.value(request, p) for p in range(length)])
                    assert torch.equal(
                        keys[i, :length], expected.view(-1, 1, 1).expand_as(keys[i, :length])
                    )
                    assert torch.equal(
                        values[i, :length], -expected.view(-1, 1, 1).expand_as(values[i, :length])
                    )
        for request in requests:
            self.write(request, len(request.token_ids) - 1)
            request.num_computed += 1
            request.token_ids.append(0)
        return seated


@pytest.mark.parametrize("seed", range(3))
def test_rows_show_the_pages_through_growth_moves_and_departures(seed: int):
    rng = random.Random(seed)
    pages = Pages(num_requests=12, max_tokens=1 << 20)
    live: dict[int, Request] = {}
    for _ in range(120):
        for row in range(12):
            if row not in live and rng.random() < 0.1:
                live[row] = pages.start(row, rng.randint(2, 150))
            elif row in live and (rng.random() < 0.02 or len(live[row].token_ids) > 200):
                del live[row]
        assert pages.step(list(live.values())) == len(live)


def test_without_memory_requests_are_left_to_their_pages():
    pages = Pages(num_requests=12, max_tokens=8 * 64)  # one block of eight rows
    live = [pages.start(row, 10) for row in range(12)]
    assert pages.step(live) == 8


def test_memory_of_blocks_nobody_is_in_is_used_again():
    pages = Pages(num_requests=8, max_tokens=8 * 128)
    live = [pages.start(row, 60) for row in range(8)]
    assert pages.step(live) == 8
    for _ in range(10):  # all outgrow the block of span 64; the one of 128 needs all of the memory
        seated = pages.step(live)
    assert seated == 8
