"""Where the tokens of a step lie in its forward, and what is wanted of their outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime.engine.scheduler.batch import wants_score
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.scheduler import Work


@dataclass(kw_only=True, eq=False)
class Layout:
    """T tokens of pieces of prompts and of guesses, end to end.

    Tokens 0..3 of a request in row 7 whose prompt they end, no log-probs of the prompt wanted::

        ids = [5, 9, 5]   positions = [0, 1, 2]   rows = [7, 7, 7]   drawn_at = [2]   scored_at = []
    """

    ids: np.ndarray  # [T] int32
    positions: np.ndarray
    rows: np.ndarray
    counts: list[int]  # tokens of each piece
    drawn: list[Request]
    drawn_at: np.ndarray  # int32
    scored: list[Request]
    scored_at: np.ndarray


def lay_out(pieces: list[Work]) -> Layout:
    ids: list[int] = []
    positions: list[np.ndarray] = []
    drawn: list[Request] = []
    drawn_at: list[int] = []
    scored: list[Request] = []
    scored_at: list[int] = []
    for piece in pieces:
        request, first, end = piece.request, len(ids), piece.start + piece.count
        ids += piece.tokens
        positions.append(np.arange(piece.start, end, dtype=np.int32))
        drawn += [request] * piece.num_draws
        drawn_at += range(len(ids) - piece.num_draws, len(ids))
        if request.logprob_start_len >= 0 and request.num_output == 0:
            wanted = [p for p in range(piece.start, end) if wants_score(piece, p)]
            scored += [request] * len(wanted)
            scored_at += [first + p - piece.start for p in wanted]
    counts = [piece.count for piece in pieces]
    rows = np.repeat(np.array([piece.request.row for piece in pieces], np.int32), counts)
    return Layout(
        ids=np.array(ids, np.int32),
        positions=np.concatenate(positions) if positions else np.zeros(0, np.int32),
        rows=rows,
        counts=counts,
        drawn=drawn,
        drawn_at=np.array(drawn_at, np.int32),
        scored=scored,
        scored_at=np.array(scored_at, np.int32),
    )
