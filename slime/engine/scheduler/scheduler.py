"""Decides which tokens of which requests the next forward computes.

    waiting ──admit──▶ running ──finish──▶ done
       ▲                  │
       └────retract───────┘   no page left for an older request, or generation is paused

A step takes one token of every decoding request and fills up with pieces of prompts, at most
`chunk_size` tokens of them. The oldest requests come first; under want of pages the youngest go back to
the queue, so the oldest always gets ahead.

What every step needs of every request lies in arrays by row of the page table, so that a step in which
nobody comes or goes costs a few operations on arrays, however many requests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from slime.engine.cache.page_pool import PagePool
from slime.engine.cache.radix_cache import RadixCache
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.speculation import Drafter

# Looking for the oldest pages costs a walk over the tree, so that a good many of them go at a time.
_EVICT_AT_LEAST, _EVICT_SHARE = 32, 1 / 32


@dataclass(frozen=True, kw_only=True)
class Work:
    """Run tokens start..start+count of a request through the model, then sample if that is its last.

    The last of them may be a draft, guesses that are not in the request's text: then the token after
    its newest one is sampled, and the one after each guess.
    """

    request: Request
    start: int
    count: int
    samples: bool
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        end = self.start + self.count - len(self.draft)
        return self.request.token_ids[self.start : end] + self.draft

    @property
    def num_draws(self) -> int:
        """How many of its last tokens a next one is sampled for."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One forward: the newest token of each decoding request, and pieces of prompts.

    With speculative decoding the decoding requests are in `guesses`, with their drafts, and nowhere else.

    `decoding` and `rows` are the same objects from step to step until a request comes or goes.
    """

    decoding: list[Request]
    rows: np.ndarray  # their rows of the page table
    positions: np.ndarray  # where their newest token stands
    pieces: list[Work]
    guesses: list[Work] = field(default_factory=list)

    @property
    def works(self) -> list[Work]:
        """The decoding requests as works, then the pieces."""
        decoding = [
            Work(request=request, start=start, count=1, samples=True)
            for request, start in zip(self.decoding, self.positions.tolist(), strict=True)
        ]
        return decoding + self.guesses + self.pieces

    def __bool__(self) -> bool:
        return bool(self.decoding or self.pieces or self.guesses)


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
    ) -> None:
        self.pool = pool
        self.drafter = drafter
        self.cache = RadixCache(pool)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        # The last row belongs to nobody: padding of a forward stands there, at page 0.
        self.page_table = np.zeros((max_running + 1, max_pages_per_request), np.int32)
        self.page_writes: list[
            tuple[int, int, list[int]]
        ] = []  # row, first page, pages; see complete
        self.new_pages: list[int] = []  # that hold what somebody else left there; see complete
        self.num_retracted = 0
        self._chunk_size = chunk_size
        self._use_prefix_cache = use_prefix_cache
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._lens = np.zeros(max_running, np.int64)  # tokens, those pending included
        self._room = np.zeros(max_running, np.int64)  # tokens the pages held have room for
        self._limits = np.zeros(max_running, np.int64)  # tokens at which a request ends
        self._prompts: list[Request] = []  # running, but not decoding yet
        self._decoding: list[Request] = []
        self._rows = np.zeros(0, np.int64)  # of _decoding
        self._stale = False  # _decoding and _rows have to be made anew

    @property
    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def scrap_row(self) -> int:
        return len(self.page_table) - 1

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def may_retract(self) -> bool:
        """Whether there may be too few pages for all that run; pending tokens must be read first."""
        self._refresh()
        wanted = int(np.count_nonzero(self._lens[self._rows] > self._room[self._rows]))
        if self._prompts:
            wanted += self.pool.pages_for(self._chunk_size) + len(self._prompts)
        return wanted > self.pool.num_available

    def schedule(self) -> Step:
        """The work of the next step; every token in it has a page."""
        self._refresh()
        retracted = self.num_retracted
        pieces, budget = self._feed()
        if self.num_retracted > retracted:
            pieces = [piece for piece in pieces if piece.request.row >= 0]
            self._refresh()
        else:
            self._admit(pieces, budget)
        decoding, rows = self._decoding, self._rows
        lens = self._lens[rows]
        unfinished = lens < self._limits[rows]
        if not unfinished.all():  # their last token is pending
            decoding = [
                r for r, wanted in zip(decoding, unfinished.tolist(), strict=True) if wanted
            ]
            rows, lens = rows[unfinished], lens[unfinished]
        if self.drafter is None:
            return Step(decoding=decoding, rows=rows, positions=lens - 1, pieces=pieces)
        guesses = [self._guess(request, self.drafter) for request in decoding]
        return Step(decoding=[], rows=rows[:0], positions=lens[:0], pieces=pieces, guesses=guesses)

    def complete(self, step: Step) -> None:
        """The tokens of this step are in the cache now and the next ones drawn, though not known yet;
        whole pages of prompts become shareable. `page_writes` and `new_pages` have been seen and start
        anew."""
        self.page_writes.clear()
        self.new_pages.clear()
        self._lens[step.rows] += 1
        for request in step.decoding:
            request.num_computed += 1
            request.num_pending += 1
        for guess in step.guesses:
            self._take_draw(guess.request)
        for piece in step.pieces:
            request = piece.request
            request.num_computed = piece.start + piece.count
            if piece.count > 1:
                self._remember(request, in_use=True)
            if piece.samples:
                request.num_pending += 1
                self._lens[request.row] += 1
                self._prompts.remove(request)
                self._stale = True

    def take_guess(self, request: Request) -> None:
        """Its newest token was guessed: it is in the cache already, and the next one is drawn."""
        self._take_draw(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and keep what it computed for others."""
        if request.row >= 0:
            self._leave(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def drop_waiting(self, requests: Collection[Request]) -> None:
        """Take requests out that have not begun, or were retracted."""
        self.waiting = deque(request for request in self.waiting if request not in requests)

    def retract_all(self) -> None:
        while self.running:
            self._retract(self.running[-1])

    def flush(self) -> None:
        self.cache.clear()

    def _refresh(self) -> None:
        if self._stale:
            prompts = set(self._prompts)
            self._decoding = [request for request in self.running if request not in prompts]
            self._rows = np.array([request.row for request in self._decoding], np.int64)
            self._stale = False

    def _feed(self) -> tuple[list[Work], int]:
        """Pages for what runs, the oldest first; the next pieces of prompts and what is left of the
        budget."""
        budget = self._chunk_size
        pieces: list[Work] = []
        hungry = np.flatnonzero(self._lens[self._rows] > self._room[self._rows]).tolist()
        wanting = {self._decoding[i] for i in hungry}.union(self._prompts)
        prompts = set(self._prompts)
        for request in [r for r in self.running if r in wanting] if wanting else []:
            if request.row < 0:  # retracted in favour of an older one
                continue
            if request not in prompts:
                self._make_room(request, int(self._lens[request.row]))
                continue
            count = min(request.num_remaining, budget)
            if count and self._make_room(request, request.num_computed + count):
                budget -= count
                pieces.append(_piece(request, count))
        return pieces, budget

    def _guess(self, request: Request, drafter: Drafter) -> Work:
        """The newest token and a draft, as long as there is room for it without pushing anyone out."""
        length = int(self._lens[request.row])
        spare = self.pool.num_available - len(self.running)
        room = (len(request.pages) + max(spare, 0)) * self.pool.page_size
        most = min(int(self._limits[request.row]) - 1, room) - length
        draft = drafter.draft(request, most)
        self._make_room(request, length + len(draft))
        count = 1 + len(draft)
        return Work(request=request, start=length - 1, count=count, samples=True, draft=draft)

    def _take_draw(self, request: Request) -> None:
        self._lens[request.row] += 1
        request.num_computed += 1
        request.num_pending += 1

    def _admit(self, pieces: list[Work], budget: int) -> None:
        if not (self.waiting and self._free_rows):
            return
        in_flight = {
            self._next_page(piece.request.token_ids, piece.start)
            for piece in pieces
            if piece.count > 1
        }
        skipped: list[Request] = []
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting.popleft()
            prefix = self._match(request)
            next_page = self._next_page(request.token_ids, len(prefix) * self.pool.page_size)
            shareable = len(next_page or ()) <= self._sharing_limit(request)
            if shareable and next_page is not None and next_page in in_flight:
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
            pieces.append(_piece(request, count))
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
        return self.cache.match(request.token_ids, self._sharing_limit(request))

    def _sharing_limit(self, request: Request) -> int:
        """Tokens from the start of its text that need not be computed for this request."""
        # The last token is always computed: its output is what the next one is sampled from.
        limit = len(request.token_ids) - 1
        if request.logprob_start_len >= 0 and request.num_output == 0:
            limit = min(limit, request.logprob_start_len)
        return limit

    def _enter(self, request: Request, prefix: list[int]) -> None:
        request.row = self._free_rows.pop()
        request.pages = prefix
        request.num_computed = len(prefix) * self.pool.page_size
        if request.num_output == 0:
            request.input_log_probs.clear()
        if request.num_retractions == 0:
            request.num_cached = request.num_computed
        request.cache_epoch = self.cache.epoch
        row = request.row
        self.page_table[row] = 0  # not the pages of the row's last owner, which are others' by now
        self._write_pages(row, 0, prefix)
        self._lens[row] = len(request.token_ids)
        self._room[row] = request.num_computed
        self._limits[row] = request.prompt_len + max(request.params.max_new_tokens, 1)
        self.running.append(request)
        self._prompts.append(request)

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
            share = int(len(self.cache) * _EVICT_SHARE)
            self.cache.evict(max(missing - self.pool.num_free, share, _EVICT_AT_LEAST))
        pages = self.pool.allocate(missing)
        self.new_pages += pages
        self._write_pages(request.row, len(request.pages), pages)
        request.pages = request.pages + pages
        self._room[request.row] = len(request.pages) * self.pool.page_size
        return True

    def _write_pages(self, row: int, first: int, pages: list[int]) -> None:
        self.page_table[row, first : first + len(pages)] = pages
        self.page_writes.append((row, first, pages))

    def _retract(self, request: Request) -> None:
        self._leave(request)
        self.running.remove(request)
        request.num_retractions += 1
        self.num_retracted += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self._remember(request, in_use=False)
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        if request in self._prompts:
            self._prompts.remove(request)
        self._stale = True
        request.pages = []
        request.num_computed = request.num_pending = 0
        request.row = -1

    def _remember(self, request: Request, *, in_use: bool) -> None:
        if self._use_prefix_cache and request.cache_epoch == self.cache.epoch:
            text, pages, count = request.token_ids, request.pages, request.num_computed
            self.cache.insert(text, pages, count, in_use=in_use)


def _piece(request: Request, count: int) -> Work:
    return Work(
        request=request,
        start=request.num_computed,
        count=count,
        samples=count == request.num_remaining,
    )
