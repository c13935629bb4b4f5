"""The two sums of slime.weights.checksum for many tensors on a GPU in one launch.

A program sums a block of _BLOCK elements of one tensor, in columns of _LANES, and adds the result to the
tensor's with atomics. Positions within a block are small, so that elements of two bytes and less need no
64-bit arithmetic until the end.
"""

# Triton's launch arguments are typed `constexpr`; numbers are what one passes.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

_LANES = 1024
_ROWS = 16
_BLOCK = _LANES * _ROWS
_ALIGNED = 16  # bytes, for vectorized loads


def many_sums(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return sum_i b_i and sum_i i * b_i of contiguous tensors on one GPU, [len(tensors), 2].

    `dtype` is the integer type of the size of their elements.
    """
    device = tensors[0].device
    addresses = np.array([tensor.data_ptr() for tensor in tensors])
    numels = np.array([tensor.numel() for tensor in tensors])
    counts = -(-numels // _BLOCK)
    ends = counts.cumsum()
    num_runs = int(ends[-1])
    table = torch.from_numpy(np.stack([addresses, numels, ends - counts, counts]))
    table = table.to(device, non_blocking=True)
    owners = torch.repeat_interleave(table[3], output_size=num_runs)
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device=device)
    if num_runs:
        _sum_runs[(num_runs,)](
            table[0],
            table[1],
            table[2],
            owners,
            sums,
            tensors[0].detach().reshape(-1).view(dtype),
            WIDE=dtype.itemsize > 2,
            ALIGNED=not (addresses % _ALIGNED).any(),
            LANES=_LANES,
            ROWS=_ROWS,
        )
    return sums


@triton.jit
def _sum_runs(
    addresses,
    numels,
    starts,
    owners,
    sums,
    like,  # a tensor of the summed dtype: the addresses are plain integers
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    run = tl.program_id(0)
    owner = tl.load(owners + run)
    source = tl.load(addresses + owner).to(like.dtype)
    numel = tl.load(numels + owner)
    start = (run - tl.load(starts + owner)) * (LANES * ROWS)
    lanes = tl.arange(0, LANES)
    kind: tl.constexpr = tl.int64 if WIDE else tl.int32
    columns = tl.zeros([LANES], kind)
    by_row = tl.zeros([LANES], kind)
    # A full block needs no mask, which allows vectorized loads.
    if start + LANES * ROWS <= numel:
        for row in tl.static_range(ROWS):
            whole = source + start + row * LANES + lanes
            if ALIGNED:
                whole = tl.max_contiguous(tl.multiple_of(whole, 16), LANES)
            found = tl.load(whole).to(kind)
            columns += found
            by_row += row * found
    else:
        for row in tl.static_range(ROWS):
            places = start + row * LANES + lanes
            found = tl.load(source + places, mask=places < numel, other=0).to(kind)
            columns += found
            by_row += row * found
    wide = columns.to(tl.int64)
    plain = tl.sum(wide)
    inside = tl.sum(by_row.to(tl.int64)) * LANES + tl.sum(wide * lanes)
    tl.atomic_add(sums + 2 * owner, plain, sem="relaxed")
    tl.atomic_add(sums + 2 * owner + 1, start * plain + inside, sem="relaxed")
