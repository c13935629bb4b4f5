"""Forwards of one shape for deterministic mode: what a row computes does not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slime.engine.cache.kv_cache import KVCache
from slime.engine.models.attention import AttentionGroup, AttentionPlan
from slime.engine.scheduler.batch import ForwardBatch, to_device, wants_score
from slime.engine.scheduler.scheduler import Work


def make_fixed_batches(
    works: list[Work], page_table: np.ndarray, cache: KVCache, num_rows: int
) -> Iterator[ForwardBatch]:
    """The same work in forwards of exactly `num_rows` rows, every token a row of its own.

    The shape of a row's attention follows from its position alone and every other operation has the
    same shape in all forwards, so a row's result does not depend on the rows beside it. Rows left over
    are padding: they stand at position 0 of page 0.
    """
    queue = [
        (work, position)
        for work in works
        for position in range(work.start, work.start + work.count)
    ]
    for first in range(0, len(queue), num_rows):
        # Longest context first: rows of one group then lie together.
        chunk = sorted(
            queue[first : first + num_rows], key=lambda item: -_bucket(item[1], cache.page_size)
        )
        yield _make_batch(chunk, page_table, cache, num_rows)


def _make_batch(
    chunk: list[tuple[Work, int]], page_table: np.ndarray, cache: KVCache, num_rows: int
) -> ForwardBatch:
    ids, positions, request_rows = (np.zeros(num_rows, np.int64) for _ in range(3))
    for row, (work, position) in enumerate(chunk):
        ids[row] = (
            work.tokens[position - work.start] if work.draft else work.request.token_ids[position]
        )
        positions[row] = position
        request_rows[row] = work.request.row
    real = np.arange(num_rows) < len(chunk)
    table = page_table[request_rows].astype(np.int64) * real[:, None]  # page 0 for padding
    pages = table[np.arange(num_rows), positions // cache.page_size]
    slots = pages * cache.page_size + positions % cache.page_size
    samples = [
        i
        for i, (work, position) in enumerate(chunk)
        if position >= work.start + work.count - work.num_draws
    ]
    samples.sort(key=lambda i: chunk[i][1])
    scores = [i for i, (work, position) in enumerate(chunk) if wants_score(work, position)]
    scores.sort(key=lambda i: chunk[i][1])
    return ForwardBatch(
        input_ids=to_device(ids, cache),
        positions=to_device(positions, cache),
        plan=AttentionPlan(
            cache=cache, slots=to_device(slots, cache), groups=_groups(positions, table, cache)
        ),
        sample_works=[chunk[i][0] for i in samples],
        sample_rows=np.array(samples, np.int64),
        sample_positions=positions[samples] + 1,
        score_rows=np.array(scores, np.int64),
        score_works=[chunk[i][0] for i in scores],
    )


def _groups(positions: np.ndarray, table: np.ndarray, cache: KVCache) -> list[AttentionGroup]:
    """One group per number of pages looked at; rows of a group lie together."""
    buckets = np.array([_bucket(int(position), cache.page_size) for position in positions])
    groups: list[AttentionGroup] = []
    for bucket in sorted(set(buckets.tolist()), reverse=True):
        rows = np.flatnonzero(buckets == bucket)
        groups.append(
            AttentionGroup(
                rows=slice(int(rows[0]), int(rows[-1]) + 1),
                source=to_device(table[rows, :bucket].reshape(-1), cache),
                positions=to_device(positions[rows, None], cache),
                kv_len=bucket * cache.page_size,
            )
        )
    return groups


def _bucket(position: int, page_size: int) -> int:
    """Pages a row at this position looks at: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    pages = position // page_size + 1
    size = 1
    while size < pages:
        if size >= 2 and size * 3 // 2 >= pages:
            return size * 3 // 2
        size *= 2
    return size
