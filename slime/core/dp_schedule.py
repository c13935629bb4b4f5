"""Assign rows to data-parallel ranks, optimizer steps and micro-batches, and weight their tokens.

Pure functions of lengths, ids and masks. `loss_weights` turns the samples' loss masks into the weight
that each token has in the loss. `make_schedule` guarantees, for any number of rows and ranks:

1. Trajectories (distinct rollout ids, by first appearance) are split into steps of
   `global_batch_size`; all rows of a trajectory are in one step; the last step may be short.
2. Every row is in exactly one micro-batch that is not a dummy, of its own step, on exactly one rank,
   and in exactly one micro-batch of that rank's log-prob pass.
3. All ranks have the same number of steps, of micro-batches in each step, and in the log-prob pass.
4. With a token budget (`max_tokens` per GPU, times `cp_size`) no micro-batch exceeds it, unless it is
   a single row that does so alone. Without one, a micro-batch has at most `micro_batch_size` rows,
   and exactly that many where the counts divide.
5. A micro-batch for which a rank has no row is a dummy: it repeats the rank's shortest row with
   weight 0. A rank without any row repeats the shortest of all rows, in dummies only.
6. With `balance`, micro-batches and ranks have nearly equal token counts (longest row first, to the
   smallest micro-batch); without it, ranks get consecutive blocks of rows in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime.core.types import Schedule

MicroBatch = list[int]


def make_schedule(
    total_lens: Sequence[int],
    trajectory_ids: Sequence[int] | np.ndarray,
    *,
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int,
    max_tokens: int | None,
    log_probs_max_tokens: int | None = None,
    balance: bool = False,
    cp_size: int = 1,
) -> list[tuple[list[int], Schedule]]:
    """Return, for each DP rank, its rows (global indices, ascending) and its Schedule in local indices.

    The log-prob pass has its own token budget, `log_probs_max_tokens`; default: `max_tokens`.
    """
    if not len(total_lens):
        raise ValueError("there are no rows to schedule")
    lens = _padded(total_lens, cp_size)
    forward_tokens = max_tokens if log_probs_max_tokens is None else log_probs_max_tokens
    limits, forward_limits = (
        _Limits(max_rows=micro_batch_size, max_tokens=None if n is None else n * cp_size)
        for n in (max_tokens, forward_tokens)
    )

    steps = steps_of_rows(trajectory_ids, global_batch_size)
    assigned = [
        _assign_to_ranks(np.flatnonzero(steps == step).tolist(), lens, dp_size, limits, balance)
        for step in range(int(steps.max()) + 1)
    ]
    rank_steps = [[step[rank] for step in assigned] for rank in range(dp_size)]
    rank_rows = [sorted(r for step in mine for mb in step for r in mb) for mine in rank_steps]
    forward = _equalise([_fit(rows, lens, forward_limits, balance) for rows in rank_rows], lens)
    shortest = min(range(len(lens)), key=lens.__getitem__)
    return [
        _number_rows(rows or [shortest], mine, log_prob, lens)
        for rows, mine, log_prob in zip(rank_rows, rank_steps, forward, strict=True)
    ]


def steps_of_rows(trajectory_ids: Sequence[int] | np.ndarray, global_batch_size: int) -> np.ndarray:
    """Return the optimizer step of each row: ids [7, 7, 5, 9] with 2 per step give [0, 0, 0, 1]."""
    _, first, inverse = np.unique(
        np.asarray(trajectory_ids), return_index=True, return_inverse=True
    )
    order_of_appearance = np.empty(len(first), np.int64)
    order_of_appearance[np.argsort(first)] = np.arange(len(first))
    return order_of_appearance[inverse] // global_batch_size


def trajectories_per_step(
    trajectory_ids: Sequence[int] | np.ndarray, global_batch_size: int
) -> np.ndarray:
    """Return, for each row, the trajectories in its step: the ids above give [2, 2, 2, 1]."""
    steps = steps_of_rows(trajectory_ids, global_batch_size)
    _, first = np.unique(np.asarray(trajectory_ids), return_index=True)
    return np.bincount(steps[first])[steps]


def loss_weights(
    loss_masks: Sequence[np.ndarray],
    trajectory_ids: Sequence[int] | np.ndarray,
    *,
    global_batch_size: int,
    per_token: bool,
) -> list[np.ndarray]:
    """Return the weight of each response token: the loss of a step is sum(weight * token loss).

    The sum runs over all tokens of all rows of the step, on any rank and in any micro-batch; nothing
    is divided afterwards. By default the loss is the mean over trajectories of the mean over their
    trained tokens. A trajectory is all rows that share a rollout id::

        weight = mask / (trained tokens of the trajectory) / (trajectories of the step)

    With `per_token` it is the mean over all trained tokens: weight = mask / (those of the step).
    A trajectory without trained tokens adds 0 to the loss but counts among the trajectories.
    """
    masks = [np.asarray(mask, np.float64) for mask in loss_masks]
    trained = np.array([mask.sum() for mask in masks])
    _, trajectory = np.unique(np.asarray(trajectory_ids), return_inverse=True)
    if per_token:
        steps = steps_of_rows(trajectory_ids, global_batch_size)
        divisor = np.bincount(steps, weights=trained)[steps]
    else:
        of_trajectory = np.bincount(trajectory, weights=trained)[trajectory]
        divisor = of_trajectory * trajectories_per_step(trajectory_ids, global_batch_size)
    scale = 1.0 / np.maximum(divisor, 1.0)  # a divisor of 0 has masks of 0 only
    return [(mask * s).astype(np.float32) for mask, s in zip(masks, scale, strict=True)]


def trained_rows(schedule: Schedule | None, num_rows: int) -> list[int]:
    """Return the rows that a rank trains on, without a row that is only in its dummy micro-batches."""
    if schedule is None:
        return list(range(num_rows))
    return sorted(
        row
        for step, micro_batches in enumerate(schedule.steps)
        for number, micro_batch in enumerate(micro_batches)
        if (step, number) not in schedule.dummies
        for row in micro_batch
    )


@dataclass(kw_only=True, frozen=True)
class _Limits:
    """Limits of one micro-batch: `max_tokens`, or `max_rows` if that is None."""

    max_rows: int
    max_tokens: int | None

    def lower_bound(self, lens: list[int]) -> int:
        """Return a number of micro-batches below which these rows cannot fit."""
        if self.max_tokens is None:
            return -(-len(lens) // self.max_rows)
        bounds = [-(-sum(min(n, self.max_tokens) for n in lens) // self.max_tokens)]
        for j in (1, 2, 3):  # of rows longer than budget/(j+1), at most j share a micro-batch
            bounds.append(-(-sum(n * (j + 1) > self.max_tokens for n in lens) // j))
        return max(bounds)

    def admits(self, rows: int, tokens: int) -> bool:
        """Return whether a micro-batch of this many rows (more than one) and tokens is allowed."""
        return rows <= self.max_rows if self.max_tokens is None else tokens <= self.max_tokens


def _padded(total_lens: Sequence[int], cp_size: int) -> list[int]:
    """Return the packed lengths: context parallelism pads each row to a multiple of 2 * cp_size."""
    unit = 2 * cp_size if cp_size > 1 else 1
    return [-(-int(n) // unit) * unit for n in total_lens]


def _assign_to_ranks(
    rows: list[int], lens: list[int], dp_size: int, limits: _Limits, balance: bool
) -> list[list[MicroBatch]]:
    """Return the micro-batches of one step for each rank, equally many; missing ones are empty."""
    if not balance:
        blocks = [block.tolist() for block in np.array_split(np.array(rows), dp_size)]
        return _equalise([_fit(block, lens, limits, False) for block in blocks], lens)
    micro_batches = _fit(rows, lens, limits, True, multiple_of=dp_size)
    micro_batches.sort(key=lambda mb: (-_tokens(mb, lens), mb))
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    # Ranks run their i-th micro-batches at the same time, so these should be of nearly equal size;
    # within such a set the largest goes to the rank with the fewest tokens so far.
    for start in range(0, len(micro_batches), dp_size):
        by_load = sorted(range(dp_size), key=lambda rank: (loads[rank], rank))
        for rank, mb in zip(by_load, micro_batches[start : start + dp_size], strict=True):
            ranks[rank].append(mb)
            loads[rank] += _tokens(mb, lens)
    return ranks


def _tokens(micro_batch: MicroBatch, lens: list[int]) -> int:
    return sum(lens[row] for row in micro_batch)


def _fit(
    rows: list[int], lens: list[int], limits: _Limits, balance: bool, multiple_of: int = 1
) -> list[MicroBatch]:
    """Split rows into micro-batches within the limits; balanced: a multiple of `multiple_of`."""
    if not balance:
        return _first_fit(rows, lens, limits)
    if not rows:
        return [[] for _ in range(multiple_of)]
    rounds = -(-limits.lower_bound([lens[r] for r in rows]) // multiple_of)
    by_length = sorted(rows, key=lambda r: (-lens[r], r))
    while True:  # terminates at the latest with one row in each
        micro_batches = _spread(by_length, lens, limits, rounds * multiple_of)
        if micro_batches is not None:
            return micro_batches
        rounds += 1


def _spread(
    by_length: list[int], lens: list[int], limits: _Limits, count: int
) -> list[MicroBatch] | None:
    """Assign each row, longest first, to the smallest of `count` micro-batches; None if one exceeds the limits."""
    micro_batches: list[MicroBatch] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in by_length:
        tokens, number = heap[0]
        chosen = micro_batches[number]
        tokens += lens[row]
        if chosen and not limits.admits(len(chosen) + 1, tokens):
            return None
        chosen.append(row)
        if limits.max_tokens is None and len(chosen) == limits.max_rows:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (tokens, number))
    return [sorted(mb) for mb in micro_batches]


def _first_fit(rows: list[int], lens: list[int], limits: _Limits) -> list[MicroBatch]:
    """Assign each row, in order, to the first micro-batch with room for it."""
    micro_batches: list[MicroBatch] = []
    tokens: list[int] = []
    for row in rows:
        for number, mb in enumerate(micro_batches):
            if limits.admits(len(mb) + 1, tokens[number] + lens[row]):
                mb.append(row)
                tokens[number] += lens[row]
                break
        else:
            micro_batches.append([row])
            tokens.append(lens[row])
    return micro_batches


def _equalise(ranks: list[list[MicroBatch]], lens: list[int]) -> list[list[MicroBatch]]:
    """Give every rank equally many micro-batches: split large ones, then add empty ones."""
    count = max(len(micro_batches) for micro_batches in ranks)
    for micro_batches in ranks:
        while len(micro_batches) < count:
            several = [mb for mb in micro_batches if len(mb) > 1]
            if not several:
                micro_batches.append([])
                continue
            largest = max(several, key=lambda mb: _tokens(mb, lens))
            half = len(largest) // 2
            micro_batches.append(largest[half:])
            del largest[half:]
    return ranks


def _number_rows(
    rows: list[int], steps: list[list[MicroBatch]], log_prob: list[MicroBatch], lens: list[int]
) -> tuple[list[int], Schedule]:
    """Replace empty micro-batches by dummies and number the rank's rows from 0."""
    local = {row: number for number, row in enumerate(rows)}
    shortest = min(rows, key=lens.__getitem__)
    dummies = frozenset(
        (step, number)
        for step, micro_batches in [(-1, log_prob), *enumerate(steps)]
        for number, mb in enumerate(micro_batches)
        if not mb
    )

    def numbered(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        return [[local[row] for row in mb or [shortest]] for mb in micro_batches]

    schedule = Schedule(
        steps=[numbered(micro_batches) for micro_batches in steps],
        log_prob_micro_batches=numbered(log_prob),
        dummies=dummies,
    )
    return rows, schedule
