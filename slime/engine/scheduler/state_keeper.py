"""Saves recurrent states, so that prefixes can be reused and retracted requests need not start over.

A state exists only after the last token of a forward, so prompts are cut into chunks at the positions where
later requests are likely to continue:

    prompt   |--- pages in the cache ---|--- the prompt's own pages ---|- rest -|
    chunks   |-------------------------->|----------------------------->|------->
    saved                          branch point                 last full page

Chunks that are cut by the budget end at a page, too. States of responses are saved every `INTERVAL` tokens in
a row of the request and enter the prefix cache when it ends, as some of its tokens may still be pending.
"""

from __future__ import annotations

from slime.engine.kv_cache import RESET
from slime.engine.radix_cache import Prefix, RadixCache, StatePool
from slime.engine.scheduler.request import Request

INTERVAL = 256  # tokens between saved states of a response


class StateKeeper:
    """`copies` are (source row, target row) to copy, in order, before the next forward."""

    def __init__(self, cache: RadixCache, pool: StatePool, page_size: int) -> None:
        self.copies: list[tuple[int, int]] = []
        self.interval = -(-INTERVAL // page_size) * page_size
        self._cache = cache
        self._pool = pool
        self._page_size = page_size

    def start(self, request: Request, prefix: Prefix) -> None:
        """Copy the state that a request continues from into its row."""
        self.copies.append((RESET if prefix.state is None else prefix.state, request.row))
        request.branch_point = len(prefix.seen) * self._page_size

    def cut(self, request: Request, count: int) -> int:
        """Return how many of the next `count` tokens of a prompt to compute in one chunk."""
        start, size = request.num_computed, self._page_size
        end, total = start + count, len(request.token_ids)
        for stop in sorted((request.branch_point, (total - 1) // size * size)):
            if start < stop < end:
                return stop - start
        if end < total and end // size * size > start:
            end = end // size * size
        return end - start

    def save_prompt(self, request: Request) -> None:
        """Save the state after a chunk of a prompt, if it ends with a cached page that has none."""
        text, count, key = request.cache_ids, request.num_computed, request.cache_key
        if count % self._page_size or not self._cache.lacks_state(text, count, key):
            return
        row = self._pool.take()
        if row is not None:
            self._cache.attach_state(text, count, row, key)
            self.copies.append((request.row, row))

    def save_response(self, request: Request) -> None:
        """Save the state of a decoding request in place of the one saved before."""
        row = self._pool.take() if request.saved_state is None else request.saved_state[0]
        if row is not None:
            request.saved_state = (row, request.num_computed)
            self.copies.append((request.row, row))

    def release(self, request: Request, *, cacheable: bool) -> None:
        """Move the saved state of a request that leaves its row to the prefix cache, or free it."""
        if request.saved_state is None:
            return
        row, count = request.saved_state
        text, key = request.cache_ids, request.cache_key
        if not (cacheable and self._cache.attach_state(text, count, row, key)):
            self._pool.give_back(row)
        request.saved_state = None
