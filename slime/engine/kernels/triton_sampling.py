"""Samples tokens on the GPU by inverse transform sampling in two passes over blocks of the vocabulary.

The first pass sums each block, the second finds the block and then the token. As on a CPU, the uniform
number depends only on the request's seed and the position. Blocks have a fixed size, so no row depends on
other rows.
"""

# pyright: reportMissingImports=false
# Triton's `static_range` has no `__iter__` for type checkers.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from slime.engine.kernels.triton_launch import pdl_wait


@triton.jit
def block_sums_kernel(
    logits,
    rows,
    temperatures,
    stats,  # [R, blocks, 2]: maximum scaled logit of a block, and sum of exp relative to it
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_wait()
    index = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.abs(tl.load(temperatures + tl.load(rows + index)))
    for i in tl.static_range(PER_PROGRAM):
        block = tl.program_id(1) * PER_PROGRAM + i
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + index * vocab + token, mask=token < vocab, other=-float("inf"))
        x = x.to(tl.float32) * inverse
        most = tl.max(x, 0)
        # A block of -inf sums to 0, and one with NaN to NaN, which fails the request.
        total = tl.sum(tl.exp(x - tl.where(most == -float("inf"), 0.0, most)), 0)
        at = (index * num_blocks + block) * 2
        tl.store(stats + at, most, mask=block < num_blocks)
        tl.store(stats + at + 1, total, mask=block < num_blocks)


@triton.jit
def splitmix64(x):
    """Return the bits of x mixed by splitmix64's finalizer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def sample_kernel(
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
    num_blocks,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the row's uniform number in the cumulative sums of the blocks, then within one block."""
    if PDL:
        pdl_wait()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    greedy = temperature < 0.0
    inverse = 1.0 / tl.abs(temperature)
    state = splitmix64(tl.load(seeds + row).to(tl.uint64) + 0x9E3779B97F4A7C15)
    position = (tl.load(positions + index) + 2).to(tl.uint64)
    state = splitmix64(state + position * 0x9E3779B97F4A7C15)
    uniform = (state >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53

    block = tl.arange(0, NUM_BLOCKS)
    known = block < num_blocks
    at = (index * num_blocks + block) * 2
    most = tl.load(stats + at, mask=known, other=-float("inf"))
    highest = tl.max(most, 0)
    weights = tl.load(stats + at + 1, mask=known, other=0.0) * tl.exp(most - highest)
    weights = tl.where(known, weights, 0.0).to(tl.float64)
    total = tl.sum(weights, 0)
    target = uniform * total
    passed = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    # The argmax of NaN may be a padding entry: clamp block and token, so that the token has an embedding.
    chosen = tl.minimum(tl.where(greedy, tl.argmax(most, 0), passed), num_blocks - 1)
    before = tl.sum(tl.where(block < chosen, weights, 0.0), 0)

    offset = tl.arange(0, BLOCK)
    token = chosen * BLOCK + offset
    x = tl.load(logits + index * vocab + token, mask=token < vocab, other=-float("inf"))
    x = x.to(tl.float32) * inverse
    inside = tl.exp(x - highest).to(tl.float64)
    passed = tl.sum((before + tl.cumsum(inside, 0) <= target).to(tl.int32), 0)
    last = tl.minimum(vocab - chosen * BLOCK, BLOCK) - 1
    # If rounding leaves no token, take the most probable of the block and not its last.
    sampled = tl.minimum(tl.where(greedy | (passed > last), tl.argmax(x, 0), passed), last)
    logit = tl.sum(tl.where(offset == sampled, x, 0.0), 0)
    result = (chosen * BLOCK + sampled).to(tl.int32)
    tl.store(tokens + index, result)
    tl.store(log_probs + index, logit - highest - tl.log(total.to(tl.float32)))
    tl.store(last_tokens + row, result)
