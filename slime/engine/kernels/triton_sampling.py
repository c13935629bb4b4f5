"""Draws tokens on the GPU: one pass over the logits, then a look into the piece that was hit.

As on a CPU, one uniform number per token, from the request's seed and the position alone, is looked up
in the cumulative distribution of the row. Pieces have a fixed size, so no row depends on the others.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import start_early


@triton.jit
def sum_pieces_kernel(
    logits,
    rows,
    temperatures,
    stats,  # [R, pieces, 2]: the greatest scaled logit of a piece, sum of weights relative to it
    vocab,
    num_pieces,
    PIECE: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        start_early()
    index = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.abs(tl.load(temperatures + tl.load(rows + index)))
    for i in tl.static_range(PER_PROGRAM):
        piece = tl.program_id(1) * PER_PROGRAM + i
        token = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits + index * vocab + token, mask=token < vocab, other=-float("inf"))
        x = x.to(tl.float32) * inverse
        most = tl.max(x, 0)
        total = tl.where(most > -float("inf"), tl.sum(tl.exp(x - most), 0), 0.0)
        at = (index * num_pieces + piece) * 2
        tl.store(stats + at, most, mask=piece < num_pieces)
        tl.store(stats + at + 1, total, mask=piece < num_pieces)


@triton.jit
def mix(x):
    """splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def choose_kernel(
    logits,
    rows,
    positions,
    temperatures,
    seeds,
    stats,
    last_tokens,
    tokens,
    log_probs,
    vocab,
    num_pieces,
    PIECE: tl.constexpr,
    PIECES_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The row's uniform number, looked up in the pieces and then in one of them."""
    if EARLY:
        start_early()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    greedy = temperature < 0.0
    inverse = 1.0 / tl.abs(temperature)
    state = mix(tl.load(seeds + row).to(tl.uint64) + 0x9E3779B97F4A7C15)
    position = (tl.load(positions + index) + 2).to(tl.uint64)
    state = mix(state + position * 0x9E3779B97F4A7C15)
    uniform = (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53

    piece = tl.arange(0, PIECES_BLOCK)
    known = piece < num_pieces
    at = (index * num_pieces + piece) * 2
    most = tl.load(stats + at, mask=known, other=-float("inf"))
    highest = tl.max(most, 0)
    weights = tl.load(stats + at + 1, mask=known, other=0.0) * tl.exp(most - highest)
    weights = tl.where(known, weights, 0.0).to(tl.float64)
    total = tl.sum(weights, 0)
    target = uniform * total
    passed = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    chosen = tl.where(greedy, tl.argmax(most, 0), tl.minimum(passed, num_pieces - 1))
    before = tl.sum(tl.where(piece < chosen, weights, 0.0), 0)

    offset = tl.arange(0, PIECE)
    token = chosen * PIECE + offset
    x = tl.load(logits + index * vocab + token, mask=token < vocab, other=-float("inf"))
    x = x.to(tl.float32) * inverse
    inside = tl.exp(x - highest).to(tl.float64)
    passed = tl.sum((before + tl.cumsum(inside, 0) <= target).to(tl.int32), 0)
    last = tl.minimum(vocab - chosen * PIECE, PIECE) - 1
    # Where rounding hides the token that is meant, the likeliest of the piece and not its last.
    drawn = tl.where(greedy | (passed > last), tl.argmax(x, 0), passed)
    logit = tl.sum(tl.where(offset == drawn, x, 0.0), 0)
    result = (chosen * PIECE + drawn).to(tl.int32)
    tl.store(tokens + index, result)
    tl.store(log_probs + index, logit - highest - tl.log(total.to(tl.float32)))
    tl.store(last_tokens + row, result)
