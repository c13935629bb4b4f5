"""Turns scheduled work into the tensors of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.cache.dense_cache import DenseCache, DenseRows
from slime.engine.cache.kv_cache import KVCache
from slime.engine.models.attention import AttentionGroup, AttentionPlan
from slime.engine.scheduler.scheduler import Work

_FILL = 0.7  # a work joins a group if it needs at least this share of what the longest one needs
_MOST_QUERIES = (
    512  # rows of one work in one group: bounds the masks, and skips what is masked anyway
)


@dataclass(kw_only=True, eq=False)
class ForwardBatch:
    """The input of one forward of T rows and what its output rows mean.

    Works "tokens 0..3 of a, last one sampled" and "token 9 of b, sampled"::

        input_ids = [b9, a0, a1, a2]    positions = [9, 0, 1, 2]
        sample_works = [work b, work a]  sample_rows = [0, 3]  sample_positions = [10, 3]
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    plan: AttentionPlan
    sample_works: list[Work]
    sample_rows: np.ndarray
    sample_positions: np.ndarray  # where the tokens to draw will stand
    score_rows: np.ndarray  # rows whose output gives the log-prob of the prompt token after them
    score_works: list[Work]  # the work each of them belongs to; in order of position for each


def make_batch(
    works: list[Work], page_table: np.ndarray, cache: KVCache, dense: DenseCache | None
) -> ForwardBatch:
    """All works in one forward: decoding rows first, longest first, then pieces of prompts."""
    page_size = cache.page_size
    works = [piece for work in works for piece in _cut(work)]
    works.sort(key=lambda w: (w.count > 1, -(w.start + w.count)))
    members = [] if dense is None else _dense_members(works, page_table, dense)
    seated = {work.request for group in members for work in group}
    paged = [work for work in works if work.request not in seated]
    works = [work for group in members for work in group] + paged
    ids, positions, request_rows = _flatten(works)
    pages = page_table[request_rows, positions // page_size].astype(np.int64)
    groups: list[AttentionGroup] = []
    row = 0
    for group in [*members, *_group(paged, page_size)]:
        source = (
            dense.rows([w.request for w in group]) if dense and group[0].request in seated else None
        )
        groups.append(_make_group(group, row, page_table, cache, source))
        row += sum(work.count for work in group)
    plan = AttentionPlan(
        cache=cache,
        slots=to_device(pages * page_size + positions % page_size, cache),
        groups=groups,
    )
    ends = np.cumsum([work.count for work in works]) - 1
    sample_works, sample_rows = _sample_rows(works, ends)
    score_works, score_rows = _score_rows(works, ends)
    return ForwardBatch(
        input_ids=to_device(ids, cache),
        positions=to_device(positions, cache),
        plan=plan,
        sample_works=sample_works,
        sample_rows=sample_rows,
        sample_positions=positions[sample_rows] + 1,
        score_rows=score_rows,
        score_works=score_works,
    )


def _dense_members(
    works: list[Work], page_table: np.ndarray, dense: DenseCache
) -> list[list[Work]]:
    """The decoding works that have rows in the dense cache, by block and in the order of rows."""
    decoding = [work for work in works if work.count == 1 and work.samples and work.start > 0]
    by_request = {work.request: work for work in decoding}
    blocks = dense.place(list(by_request), page_table)
    return [[by_request[request] for request in block] for block in blocks]


def _cut(work: Work) -> list[Work]:
    if work.count <= _MOST_QUERIES:
        return [work]
    end = work.start + work.count
    return [
        Work(
            request=work.request,
            start=start,
            count=min(_MOST_QUERIES, end - start),
            samples=work.samples and start + _MOST_QUERIES >= end,
            draft=work.draft if start + _MOST_QUERIES >= end else [],
        )
        for start in range(work.start, end, _MOST_QUERIES)
    ]


def _flatten(works: list[Work]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, positions and page table rows of all tokens, end to end."""
    ids: list[int] = []
    for work in works:
        if work.count == 1:
            ids.append(work.request.token_ids[work.start])
        else:
            ids.extend(work.tokens)
    counts = np.array([work.count for work in works])
    starts = np.array([work.start for work in works])
    firsts = np.cumsum(counts) - counts
    positions = np.arange(len(ids)) - np.repeat(firsts - starts, counts)
    request_rows = np.repeat(np.array([work.request.row for work in works]), counts)
    return np.array(ids, np.int64), positions, request_rows


def _group(works: list[Work], page_size: int) -> Iterator[list[Work]]:
    """Runs of works that fill a rectangle well enough; the works come sorted, longest first."""
    group: list[Work] = []
    for work in works:
        if group and not _belongs(work, group[0], page_size):
            yield group
            group = []
        group.append(work)
    if group:
        yield group


def _belongs(work: Work, longest: Work, page_size: int) -> bool:
    if (work.count > 1) != (longest.count > 1):
        return False
    if work.count > 1 and not _FILL <= work.count / longest.count <= 1 / _FILL:
        return False
    pages = -(-(work.start + work.count) // page_size)
    most = -(-(longest.start + longest.count) // page_size)
    return pages >= most * _FILL or most <= 4


def _make_group(
    works: list[Work],
    first_row: int,
    page_table: np.ndarray,
    cache: KVCache,
    dense_rows: DenseRows | None,
) -> AttentionGroup:
    counts = np.array([work.count for work in works])
    starts = np.array([work.start for work in works])
    kv_len, q_len = int((starts + counts).max()), int(counts.max())
    source: torch.Tensor | DenseRows
    if dense_rows is not None:
        source = dense_rows
    else:
        num_pages = -(-kv_len // cache.page_size)
        kv_len = num_pages * cache.page_size
        table = page_table[[work.request.row for work in works], :num_pages]
        source = to_device(table.reshape(-1), cache)
    offsets = np.arange(q_len)
    real = offsets < counts[:, None]  # [B, Q]
    total = int(counts.sum())
    rows: slice | torch.Tensor = slice(first_row, first_row + total)
    valid = None
    if total < real.size:
        row_of = (first_row + np.cumsum(counts) - counts)[:, None]
        row_of = row_of + np.minimum(offsets, counts[:, None] - 1)
        rows = to_device(row_of.reshape(-1), cache)
        valid = to_device(np.flatnonzero(real.reshape(-1)), cache)
    return AttentionGroup(
        rows=rows,
        source=source,
        positions=to_device((starts[:, None] + offsets) * real, cache),
        kv_len=kv_len,
        valid=valid,
    )


def _sample_rows(works: list[Work], ends: np.ndarray) -> tuple[list[Work], np.ndarray]:
    draws = np.array([work.num_draws for work in works], np.int64)
    owners = [work for work in works for _ in range(work.num_draws)]
    behind = np.concatenate([np.arange(count)[::-1] for count in draws])  # rows before its last
    return owners, np.repeat(ends, draws) - behind.astype(np.int64)


def _score_rows(works: list[Work], ends: np.ndarray) -> tuple[list[Work], np.ndarray]:
    owners: list[Work] = []
    rows: list[int] = []
    for work, end in zip(works, ends.tolist(), strict=True):
        if work.request.logprob_start_len < 0 or work.request.num_output:
            continue
        first = end - work.count + 1 - work.start
        for position in range(work.start, work.start + work.count):
            if wants_score(work, position):
                owners.append(work)
                rows.append(first + position)
    return owners, np.array(rows, np.int64)


def wants_score(work: Work, position: int) -> bool:
    request = work.request
    return (
        request.num_output == 0
        and 0 <= request.logprob_start_len <= position < request.prompt_len - 1
    )


def to_device(array: np.ndarray, cache: KVCache) -> torch.Tensor:
    return torch.from_numpy(array).to(cache.device)
