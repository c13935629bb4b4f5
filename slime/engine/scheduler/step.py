"""One step: the tokens to compute, as spans of requests and as flat arrays, and the output.

Deterministic mode: every forward has exactly ``FIXED_ROWS`` tokens, each a sequence of its own, so
that all operations have the same shape in every forward and a token's result does not depend, bit for
bit, on the other tokens. `split_fixed` builds these forwards for all runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from slime.engine.scheduler.prompt_images import ImageRows
from slime.engine.scheduler.request import Request

FIXED_ROWS = 32  # tokens of every forward in deterministic mode
LAST_SAMPLED = -1  # placeholder id: the token last sampled in this row, possibly only on the device


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """Tokens start..start+count of a request to compute in one forward, with sampling if they are its last.

    The last of them may be draft tokens, which are not in `request.token_ids`: then a token is sampled after
    the newest token and after each draft token.
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
    def num_samples(self) -> int:
        """Return how many tokens are sampled: one after each of the last `num_samples` tokens."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What one step computes: the newest token of each decoding request, and prefill chunks.

    With speculative decoding the decoding requests are in `drafts` instead of `decoding`. `decoding` and
    `rows` are the same objects from step to step until a request starts or finishes.
    """

    decoding: list[Request]
    rows: np.ndarray  # their rows of the page table
    positions: np.ndarray  # of their newest tokens
    prefill: list[TokenSpan]
    drafts: list[TokenSpan] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefill or self.drafts)


@dataclass(kw_only=True, eq=False)
class StepOutput:
    """The tokens sampled in one step, one for each of `requests`, and the log-probs of prompt tokens."""

    requests: list[Request]
    tokens: list[int]
    log_probs: list[float]
    scored: list[tuple[Request, float]]


class PendingStep(Protocol):
    """A launched step that the device may still be computing."""

    @property
    def blocks_next_step(self) -> bool:
        """Return whether the next step needs this one's tokens before it can be launched."""
        ...

    def wait(self) -> StepOutput:
        """Wait for the device and return the output."""
        ...


@dataclass(kw_only=True, eq=False)
class FinishedStep:
    """A step whose output is known when `launch` returns."""

    output: StepOutput
    blocks_next_step: bool = True

    def wait(self) -> StepOutput:
        return self.output


def join_outputs(parts: list[StepOutput]) -> StepOutput:
    if len(parts) == 1:
        return parts[0]
    return StepOutput(
        requests=[request for part in parts for request in part.requests],
        tokens=[token for part in parts for token in part.tokens],
        log_probs=[value for part in parts for value in part.log_probs],
        scored=[entry for part in parts for entry in part.scored],
    )


@dataclass(kw_only=True, eq=False)
class StepBatch:
    """T tokens of one forward, sequence after sequence.

    Tokens 0..2 of a request in row 7 of the page table that end its prompt, no prompt log-probs wanted::

        ids = [5, 9, 5]   positions = [0, 1, 2]   rows = [7, 7, 7]   counts = [3]
        sampled_at = [2]   scored_at = []
    """

    ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32
    rows: np.ndarray  # [T] int32, of the page table
    counts: list[int]  # tokens of each sequence; their sum is T
    sampled: list[Request]  # for whom a token is sampled
    sampled_at: np.ndarray  # int64, which of the T logits each is sampled from
    scored: list[Request]  # whose prompt tokens get a log-prob
    scored_at: (
        np.ndarray
    )  # int64, tokens whose logits give the log-prob of the prompt token after them
    rope: np.ndarray | None = None  # RoPE positions [T, 3] int32; None: `positions` (no images)
    images: list[ImageRows] = field(default_factory=list)  # image tokens among the T


def make_batch(step: Step) -> StepBatch:
    """Return the whole step as one batch: decoding requests first, then drafts and prefill chunks."""
    count, spans = len(step.decoding), step.drafts + step.prefill
    decoding = StepBatch(
        ids=np.full(count, LAST_SAMPLED, np.int32),
        positions=step.positions.astype(np.int32),
        rows=step.rows.astype(np.int32),
        counts=[1] * count,
        sampled=step.decoding,
        sampled_at=np.arange(count),
        scored=[],
        scored_at=np.zeros(0, np.int64),
    )
    deltas = np.array([request.rope_delta for request in step.decoding], np.int32)
    if deltas.any():
        decoding.rope = np.repeat((decoding.positions + deltas)[:, None], 3, axis=1)
    if not spans:
        return decoding
    batch = make_span_batch(spans)
    rope = None
    if decoding.rope is not None or batch.rope is not None:
        rope = np.concatenate([_rope_positions(decoding), _rope_positions(batch)])
    return StepBatch(
        ids=np.concatenate([decoding.ids, batch.ids]),
        positions=np.concatenate([decoding.positions, batch.positions]),
        rows=np.concatenate([decoding.rows, batch.rows]),
        counts=decoding.counts + batch.counts,
        sampled=step.decoding + batch.sampled,
        sampled_at=np.concatenate([decoding.sampled_at, batch.sampled_at + count]),
        scored=batch.scored,
        scored_at=batch.scored_at + count,
        rope=rope,
        images=[replace(rows, at=rows.at + count) for rows in batch.images],
    )


def _rope_positions(batch: StepBatch) -> np.ndarray:
    return np.repeat(batch.positions[:, None], 3, axis=1) if batch.rope is None else batch.rope


def make_span_batch(spans: list[TokenSpan]) -> StepBatch:
    ids: list[int] = []
    positions: list[np.ndarray] = []
    sampled: list[Request] = []
    sampled_at: list[int] = []
    scored: list[Request] = []
    scored_at: list[int] = []
    images: list[ImageRows] = []
    for span in spans:
        request, first, end = span.request, len(ids), span.start + span.count
        ids += span.tokens
        positions.append(np.arange(span.start, end, dtype=np.int32))
        if request.images is not None:
            images += request.images.rows(span.start, end, first)
        sampled += [request] * span.num_samples
        sampled_at += range(len(ids) - span.num_samples, len(ids))
        wanted = _scored_positions(request, span.start, end)
        scored += [request] * len(wanted)
        scored_at += [first + position - span.start for position in wanted]
    counts = [span.count for span in spans]
    return StepBatch(
        ids=np.array(ids, np.int32),
        positions=np.concatenate(positions),
        rows=np.repeat(np.array([span.request.row for span in spans], np.int32), counts),
        counts=counts,
        sampled=sampled,
        sampled_at=np.array(sampled_at, np.int64),
        scored=scored,
        scored_at=np.array(scored_at, np.int64),
        rope=_span_rope(spans),
        images=images,
    )


def _span_rope(spans: list[TokenSpan]) -> np.ndarray | None:
    if all(span.request.images is None for span in spans):
        return None
    parts: list[np.ndarray] = []
    for span in spans:
        images, end = span.request.images, span.start + span.count
        if images is None:
            parts.append(np.repeat(np.arange(span.start, end, dtype=np.int32)[:, None], 3, axis=1))
        else:
            parts.append(images.rope_positions(span.start, end))
    return np.concatenate(parts)


def split_fixed(batch: StepBatch, padding_row: int) -> Iterator[StepBatch]:
    """Yield the batch in forwards of exactly FIXED_ROWS tokens, each token a sequence of its own.

    The last one is filled up with token 0 at position 0 of the padding row.
    """
    for first in range(0, len(batch.ids), FIXED_ROWS):
        part = slice(first, first + FIXED_ROWS)
        ids, positions, rows = np.zeros((3, FIXED_ROWS), np.int32)
        rope = None if batch.rope is None else np.zeros((FIXED_ROWS, 3), np.int32)
        rows[:] = padding_row
        for target, source in (
            (ids, batch.ids),
            (positions, batch.positions),
            (rows, batch.rows),
        ):
            target[: len(source[part])] = source[part]
        if rope is not None and batch.rope is not None:
            rope[: len(batch.rope[part])] = batch.rope[part]
        sampled = np.flatnonzero(batch.sampled_at // FIXED_ROWS == first // FIXED_ROWS)
        scored = np.flatnonzero(batch.scored_at // FIXED_ROWS == first // FIXED_ROWS)
        yield StepBatch(
            ids=ids,
            positions=positions,
            rows=rows,
            counts=[1] * FIXED_ROWS,
            sampled=[batch.sampled[i] for i in sampled],
            sampled_at=batch.sampled_at[sampled] - first,
            scored=[batch.scored[i] for i in scored],
            scored_at=batch.scored_at[scored] - first,
            rope=rope,
            images=[rows for image in batch.images for rows in image.within(first, FIXED_ROWS)],
        )


def _scored_positions(request: Request, start: int, end: int) -> range:
    """Return the positions in start..end whose logits give the log-prob of a prompt token."""
    if request.logprob_start_len < 0 or request.num_output:
        return range(0)
    return range(max(start, request.logprob_start_len), min(end, request.prompt_len - 1))
