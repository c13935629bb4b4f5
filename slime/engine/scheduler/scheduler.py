"""Decides which tokens of which requests the next step computes.

    waiting ──admit──▶ running ──finish──▶ done
       ▲                  │
       └────retract───────┘   no free page for an older request, or generation is paused

A step computes one token of every decoding request and prefill chunks of at most `chunk_size` tokens in
all. The oldest requests come first; when pages run out the youngest are retracted (preempted), so the
oldest always makes progress. Pages of cached prefixes that no request uses are evicted before that. A
retracted request returns to the front of the queue with its tokens and log-probs; its KV cache is
recomputed, apart from what the prefix cache still has.

Per-request state that every step needs is in arrays by row of the page table, so that a step in which no
request starts or finishes costs a few array operations, however many requests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from slime.engine.radix_cache import PagePool, Prefix, RadixCache, StatePool
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.speculation import Drafter
from slime.engine.scheduler.state_keeper import StateKeeper
from slime.engine.scheduler.step import Step, TokenSpan

# Finding the least recently used pages walks the whole tree, so many are evicted at a time.
_EVICT_AT_LEAST, _EVICT_SHARE = 32, 1 / 32


class Scheduler:
    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        max_pages_per_request: int,
        chunk_size: int,
        use_prefix_cache: bool = True,
        drafter: Drafter | None = None,
        num_saved_states: int | None = None,  # None: the model has no recurrent layers
    ) -> None:
        self.pool = pool
        self.max_running = max_running
        self.drafter = drafter
        # Recurrent states: those of the running requests, the padding state, and the saved ones.
        self.num_state_rows = max_running + 1 + (num_saved_states or 0)
        saved: StatePool | None = None
        if num_saved_states is not None:
            saved = StatePool(range(max_running + 1, self.num_state_rows))
        self.cache = RadixCache(pool, saved)
        self.states = None if saved is None else StateKeeper(self.cache, saved, pool.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        # The last row is the padding row: its pages are 0, the padding page.
        self.page_table = np.zeros((max_running + 1, max_pages_per_request), np.int32)
        # Slot of the adapter of each row, -1: base model only.
        self.row_slots = np.full(max_running + 1, -1, np.int32)
        # Row, first page and pages; see complete.
        self.page_writes: list[tuple[int, int, list[int]]] = []
        self.new_pages: list[int] = []  # with stale contents of earlier requests; see complete
        self.num_retracted = 0
        self._chunk_size = chunk_size
        self._use_prefix_cache = use_prefix_cache
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._lens = np.zeros(max_running, np.int64)  # tokens, those pending included
        self._capacity = np.zeros(max_running, np.int64)  # tokens that fit into the pages held
        self._limits = np.zeros(max_running, np.int64)  # tokens at which a request ends
        self._prompts: list[Request] = []  # running, but not decoding yet
        self._decoding: list[Request] = []
        self._rows = np.zeros(0, np.int64)  # of _decoding
        self._decoding_changed = False  # _decoding and _rows are out of date

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def padding_row(self) -> int:
        return self.max_running

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def may_retract(self) -> bool:
        """Return whether pages may run out in the next step, so that pending tokens must be read first."""
        self._refresh()
        wanted = int(np.count_nonzero(self._lens[self._rows] > self._capacity[self._rows]))
        if self._prompts:
            wanted += self.pool.pages_for(self._chunk_size) + len(self._prompts)
        return wanted > self.pool.num_available

    def schedule(self) -> Step:
        """Return the next step; every token in it has a page."""
        self._refresh()
        retracted = self.num_retracted
        spans, budget = self._schedule_running()
        if self.num_retracted > retracted:
            spans = [span for span in spans if span.request.row >= 0]
            self._refresh()
        else:
            self._admit(spans, budget)
        decoding, rows = self._decoding, self._rows
        lens = self._lens[rows]
        unfinished = lens < self._limits[rows]
        if not unfinished.all():  # their last token is pending
            decoding = [
                r for r, wanted in zip(decoding, unfinished.tolist(), strict=True) if wanted
            ]
            rows, lens = rows[unfinished], lens[unfinished]
        if self.drafter is None:
            return Step(decoding=decoding, rows=rows, positions=lens - 1, prefill=spans)
        drafts = [self._draft_span(request, self.drafter) for request in decoding]
        return Step(decoding=[], rows=rows[:0], positions=lens[:0], prefill=spans, drafts=drafts)

    def complete(self, step: Step) -> None:
        """Account for a launched step: its tokens are in the cache, and the sampled ones are pending. Full
        pages of prompts become shareable. Clear `page_writes`, `new_pages` and the state copies of this step,
        then add the state copies that must precede the next step."""
        self.page_writes.clear()
        self.new_pages.clear()
        if self.states is not None:
            self.states.copies.clear()
        self._lens[step.rows] += 1
        for request in step.decoding:
            request.num_computed += 1
            request.num_pending += 1
        for span in step.drafts:
            self.advance(span.request)
        for span in step.prefill:
            request = span.request
            request.num_computed = span.start + span.count
            if self.states is not None and not span.samples and self._is_cacheable(request):
                self._share_chunk(request, self.states)
            elif span.count > 1:
                self._cache_prefix(request, in_use=True)
            if span.samples:
                request.num_pending += 1
                self._lens[request.row] += 1
                self._prompts.remove(request)
                self._decoding_changed = True
        if self.states is not None:
            self._save_responses(step, self.states)

    def advance(self, request: Request) -> None:
        """Account for one more token in the cache, also an accepted draft token; the next one is sampled."""
        self._lens[request.row] += 1
        request.num_computed += 1
        request.num_pending += 1

    def finish(self, request: Request) -> None:
        """Remove a request, running or waiting, and keep its full pages in the prefix cache."""
        if request.row >= 0:
            self._release(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def drop_waiting(self, requests: Collection[Request]) -> None:
        """Remove requests from the queue."""
        self.waiting = deque(request for request in self.waiting if request not in requests)

    def retract_all(self) -> None:
        while self.running:
            self._retract(self.running[-1])

    def flush(self) -> None:
        self.cache.clear()
        if self.states is not None:  # their target rows belonged to the cache
            self.states.copies.clear()

    def _refresh(self) -> None:
        if self._decoding_changed:
            prompts = set(self._prompts)
            self._decoding = [request for request in self.running if request not in prompts]
            self._rows = np.array([request.row for request in self._decoding], np.int64)
            self._decoding_changed = False

    def _schedule_running(self) -> tuple[list[TokenSpan], int]:
        """Allocate pages for the running requests, oldest first; return their next prefill chunks and the
        token budget that is left."""
        budget = self._chunk_size
        spans: list[TokenSpan] = []
        full = np.flatnonzero(self._lens[self._rows] > self._capacity[self._rows]).tolist()
        wanting = {self._decoding[i] for i in full}.union(self._prompts)
        prompts = set(self._prompts)
        for request in [r for r in self.running if r in wanting] if wanting else []:
            if request.row < 0:  # retracted to free pages for an older request
                continue
            if request not in prompts:
                self._allocate_pages(request, int(self._lens[request.row]))
                continue
            count = self._chunk_len(request, budget)
            if count and self._allocate_pages(request, request.num_computed + count):
                budget -= count
                spans.append(_next_chunk(request, count))
        return spans, budget

    def _draft_span(self, request: Request, drafter: Drafter) -> TokenSpan:
        """Return the newest token with a draft that fits into free pages, without retracting others."""
        length = int(self._lens[request.row])
        spare = self.pool.num_available - len(self.running)
        capacity = (len(request.pages) + max(spare, 0)) * self.pool.page_size
        most = min(int(self._limits[request.row]) - 1, capacity) - length
        draft = drafter.draft(request, most)
        self._allocate_pages(request, length + len(draft))
        count = 1 + len(draft)
        return TokenSpan(request=request, start=length - 1, count=count, samples=True, draft=draft)

    def _admit(self, spans: list[TokenSpan], budget: int) -> None:
        if not (self.waiting and self._free_rows):
            return
        in_flight = {self._next_page(span.request, span.start) for span in spans if span.count > 1}
        skipped: list[Request] = []
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting.popleft()
            prefix = self._match(request)
            next_page = self._next_page(request, len(prefix.pages) * self.pool.page_size)
            shareable = len(next_page or ()) - 1 <= self._sharing_limit(request)
            if shareable and next_page is not None and next_page in in_flight:
                # Another request computes this page in the same step: wait and share it.
                skipped.append(request)
                continue
            if not self._hold_if_fits(request, prefix.pages):
                skipped.append(request)
                break
            self._start(request, prefix)
            count = self._chunk_len(request, budget)
            budget -= count
            if not self._allocate_pages(request, request.num_computed + count):
                raise RuntimeError("a request was admitted without pages for its first chunk")
            in_flight.add(next_page)
            spans.append(_next_chunk(request, count))
        self.waiting.extendleft(reversed(skipped))

    def _hold_if_fits(self, request: Request, prefix: list[int]) -> bool:
        """Hold the prefix if the whole prompt fits, with one spare page for each running request; otherwise
        this request would soon be retracted again."""
        self.pool.hold(prefix)
        needed = self.pool.pages_for(len(request.token_ids) + 1) - len(prefix)
        if needed <= self.pool.num_available - len(self.running):
            return True
        self.pool.release(prefix)
        return False

    def _next_page(self, request: Request, num_computed: int) -> tuple[int, ...] | None:
        """Return the cache key and tokens up to the end of the first page not computed yet; None past the
        prompt."""
        end = (num_computed // self.pool.page_size + 1) * self.pool.page_size
        if not self._use_prefix_cache or end >= len(request.token_ids):
            return None
        return (request.cache_key, *request.cache_ids[:end])

    def _match(self, request: Request) -> Prefix:
        if not self._use_prefix_cache:
            return Prefix(pages=[])
        limit = self._sharing_limit(request)
        return self.cache.find(request.cache_ids, limit, request.cache_key)

    def _chunk_len(self, request: Request, budget: int) -> int:
        """Return how many tokens of a prompt to compute next."""
        count = min(request.num_remaining, budget)
        if self.states is None or not self._use_prefix_cache:
            return count
        return self.states.cut(request, count)

    def _share_chunk(self, request: Request, states: StateKeeper) -> None:
        """Insert the pages and the state after a chunk of a prompt.

        Up to the branch point the prefix cache has pages but no state: they replace the request's own.
        """
        if request.num_computed == request.branch_point:
            count, key = request.num_computed, request.cache_key
            shared = self.cache.find(request.cache_ids, count, key).seen
            own = request.pages[: len(shared)]
            if shared != own:
                self.pool.hold(shared)
                self.pool.release(own)
                request.pages = shared + request.pages[len(shared) :]
                self._write_pages(request.row, 0, shared)
        self._cache_prefix(request, in_use=True)
        states.save_prompt(request)

    def _save_responses(self, step: Step, states: StateKeeper) -> None:
        computed = self._lens[step.rows] - 1
        for index in np.flatnonzero(computed % states.interval == 0).tolist():
            if self._is_cacheable(step.decoding[index]):
                states.save_response(step.decoding[index])

    def _sharing_limit(self, request: Request) -> int:
        """Return how many leading tokens may come from the prefix cache."""
        # The last token is always computed: its output is what the next one is sampled from.
        limit = len(request.token_ids) - 1
        if request.logprob_start_len >= 0 and request.num_output == 0:
            limit = min(limit, request.logprob_start_len)
        return limit

    def _start(self, request: Request, prefix: Prefix) -> None:
        request.row = self._free_rows.pop()
        request.pages = prefix.pages
        request.num_computed = len(prefix.pages) * self.pool.page_size
        if self.states is not None:
            self.states.start(request, prefix)
        if request.num_output == 0:
            request.input_log_probs.clear()
        if request.num_retractions == 0:
            request.num_cached = request.num_computed
        request.cache_epoch = (self.cache.epoch, request.cache_key)
        row = request.row
        self.row_slots[row] = -1 if request.adapter is None else request.adapter.slot
        self.page_table[row] = 0  # remove the pages of the row's previous request
        self._write_pages(row, 0, prefix.pages)
        self._lens[row] = len(request.token_ids)
        self._capacity[row] = request.num_computed
        self._limits[row] = request.prompt_len + max(request.params.max_new_tokens, 1)
        self.running.append(request)
        self._prompts.append(request)

    def _allocate_pages(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages for the first `num_tokens` of the request, retracting younger ones if needed.

        Return False if it was the youngest itself and was retracted.
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
            share = int(len(self.cache) * _EVICT_SHARE)
            self.cache.evict(max(missing - self.pool.num_free, share, _EVICT_AT_LEAST))
        pages = self.pool.allocate(missing)
        self.new_pages += pages
        self._write_pages(request.row, len(request.pages), pages)
        request.pages = request.pages + pages
        self._capacity[request.row] = len(request.pages) * self.pool.page_size
        return True

    def _write_pages(self, row: int, first: int, pages: list[int]) -> None:
        self.page_table[row, first : first + len(pages)] = pages
        self.page_writes.append((row, first, pages))

    def _retract(self, request: Request) -> None:
        self._release(request)
        self.running.remove(request)
        request.num_retractions += 1
        self.num_retracted += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._cache_prefix(request, in_use=False)
        if self.states is not None:
            self.states.release(request, cacheable=self._is_cacheable(request))
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        if request in self._prompts:
            self._prompts.remove(request)
        self._decoding_changed = True
        request.pages = []
        request.num_computed = request.num_pending = 0
        request.row = -1

    def _is_cacheable(self, request: Request) -> bool:
        """Return whether its pages have the weights and the adapter version of the prefix cache."""
        return self._use_prefix_cache and request.cache_epoch == (
            self.cache.epoch,
            request.cache_key,
        )

    def _cache_prefix(self, request: Request, *, in_use: bool) -> None:
        if self._is_cacheable(request):
            text, pages, count = request.cache_ids, request.pages, request.num_computed
            self.cache.insert(text, pages, count, in_use=in_use, adapter=request.cache_key)


def _next_chunk(request: Request, count: int) -> TokenSpan:
    return TokenSpan(
        request=request,
        start=request.num_computed,
        count=count,
        samples=count == request.num_remaining,
    )
