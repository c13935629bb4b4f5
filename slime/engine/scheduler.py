"""Decides which tokens of which requests the next forward computes.

    waiting ──admit──▶ running ──finish──▶ done
       ▲                  │
       └────retract───────┘   no page left for an older request, or generation is paused

A step takes one token of every decoding request and fills up with pieces of prompts, at most
`chunk_size` tokens of them. The oldest requests come first; under want of pages the youngest go back to
the queue, so the oldest always gets ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from slime.engine.page_pool import PagePool
from slime.engine.radix_cache import RadixCache
from slime.engine.request import Request

_EVICT_AT_LEAST = 32  # pages; looking for the oldest costs a walk over the tree


@dataclass(frozen=True, kw_only=True)
class Work:
    """Run tokens start..start+count of a request through the model, then sample if that is its last."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.request.token_ids)


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        max_pages_per_request: int,
        chunk_size: int,
        use_prefix_cache: bool = True,
    ) -> None:
        self.pool = pool
        self.cache = RadixCache(pool)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.page_table = np.zeros((max_running, max_pages_per_request), np.int64)
        self.num_retracted = 0
        self._chunk_size = chunk_size
        self._use_prefix_cache = use_prefix_cache
        self._free_rows = list(range(max_running - 1, -1, -1))

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """The work of the next step; every token in it has a page."""
        budget = self._chunk_size
        works: list[Work] = []
        retracted = False
        for request in list(self.running):
            if request.row < 0:  # retracted in favour of an older one
                continue
            decoding = request.num_remaining == 1
            count = 1 if decoding else min(request.num_remaining, budget)
            if count == 0:
                continue
            if not self._make_room(request, request.num_computed + count):
                retracted = True
                continue
            budget -= 0 if decoding else count
            works.append(Work(request=request, start=request.num_computed, count=count))
        retracted = retracted or any(work.request.row < 0 for work in works)
        works = [work for work in works if work.request.row >= 0]
        if not retracted:
            self._admit(works, budget)
        return works

    def complete(self, works: list[Work]) -> None:
        """The tokens of these works are in the cache now; whole pages of prompts become shareable."""
        for work in works:
            request = work.request
            request.num_computed = work.start + work.count
            if work.count > 1:
                self._remember(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and keep what it computed for others."""
        if request.row >= 0:
            self._leave(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def retract_all(self) -> None:
        while self.running:
            self._retract(self.running[-1])

    def flush(self) -> None:
        self.cache.clear()

    def _admit(self, works: list[Work], budget: int) -> None:
        in_flight = {
            self._next_page(work.request.token_ids, work.start) for work in works if work.count > 1
        }
        skipped: list[Request] = []
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting.popleft()
            prefix = self._match(request)
            next_page = self._next_page(request.token_ids, len(prefix) * self.pool.page_size)
            if next_page is not None and next_page in in_flight:
                # Another request computes this page in this very step: wait for it and share it.
                skipped.append(request)
                continue
            if not self._fits(request, prefix):
                skipped.append(request)
                break
            self._enter(request, prefix)
            count = min(request.num_remaining, budget)
            budget -= count
            if not self._make_room(request, request.num_computed + count):
                raise RuntimeError("a request was admitted without pages for its first chunk")
            in_flight.add(next_page)
            works.append(Work(request=request, start=request.num_computed, count=count))
        self.waiting.extendleft(reversed(skipped))

    def _fits(self, request: Request, prefix: list[int]) -> bool:
        """Hold the prefix if the whole prompt fits beside it, with a page for each running request to
        grow into (without one it would soon push this one out again)."""
        self.pool.hold(prefix)
        needed = self.pool.pages_for(len(request.token_ids) + 1) - len(prefix)
        if needed <= self.pool.num_available - len(self.running):
            return True
        self.pool.release(prefix)
        return False

    def _next_page(self, token_ids: list[int], num_computed: int) -> tuple[int, ...] | None:
        """The text up to the end of the first page not computed yet; None if that is past the prompt."""
        end = (num_computed // self.pool.page_size + 1) * self.pool.page_size
        return tuple(token_ids[:end]) if self._use_prefix_cache and end < len(token_ids) else None

    def _match(self, request: Request) -> list[int]:
        if not self._use_prefix_cache:
            return []
        # The last token is always computed: its output is what the next one is sampled from.
        limit = len(request.token_ids) - 1
        if request.logprob_start_len >= 0 and request.num_output == 0:
            limit = min(limit, request.logprob_start_len)
        return self.cache.match(request.token_ids, limit)

    def _enter(self, request: Request, prefix: list[int]) -> None:
        request.row = self._free_rows.pop()
        request.pages = prefix
        request.num_computed = len(prefix) * self.pool.page_size
        if request.num_output == 0:
            request.input_log_probs.clear()
        if request.num_retractions == 0:
            request.num_cached = request.num_computed
        request.cache_epoch = self.cache.epoch
        self.page_table[request.row, : len(prefix)] = prefix
        self.running.append(request)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give the request pages for its first `num_tokens`, retracting younger requests if needed.

        False: it was itself the youngest and went back to the queue.
        """
        missing = self.pool.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        while self.pool.num_available < missing:
            youngest = self.running[-1]
            self._retract(youngest)
            if youngest is request:
                return False
        if self.pool.num_free < missing:
            self.cache.evict(max(missing - self.pool.num_free, _EVICT_AT_LEAST))
        held = len(request.pages)
        request.pages = request.pages + self.pool.allocate(missing)
        self.page_table[request.row, held : held + missing] = request.pages[held:]
        return True

    def _retract(self, request: Request) -> None:
        self._leave(request)
        self.running.remove(request)
        request.num_retractions += 1
        self.num_retracted += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self._remember(request)
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        request.pages = []
        request.num_computed = 0
        request.row = -1

    def _remember(self, request: Request) -> None:
        if self._use_prefix_cache and request.cache_epoch == self.cache.epoch:
            self.cache.insert(request.token_ids, request.pages, request.num_computed)
