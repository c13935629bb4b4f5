"""Integer checksums of tensors that add up over shards and detect swapped or transposed contents.

The sum of a tensor is  sum_i bits(x_i) * (hash(name) + K * i)  modulo 2**64, with bits(x_i) the
element's bit pattern as an integer (signed, except of one byte) and i its flat position in the Hugging
Face tensor. A shard that starts at flat position s contributes its part of the sum, so parts of
several ranks can simply be added. Integer arithmetic makes the result independent of the order of
summation, of device and of library.

Written as a matrix of rows of C elements, sum_i i * b_i is  sum_r r * C * rowsum_r + sum_c c * colsum_c:
two plain reductions instead of a multiplication by positions the size of the tensor itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence

import torch

_POSITION_FACTOR = 0x9E3779B97F4A7C15  # odd: a change at any position changes the sum
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS = 1024
# Blocks of 31 x 1024 stay in a core's cache when widened to int64, and are just too small for torch to
# parallelize, where barriers would cost far more than threads gain on a busy machine.
_CPU_ROWS = 31


def tensor_checksum(name: str, tensor: torch.Tensor, start: int = 0) -> int:
    """Return the checksum of the elements of HF tensor `name` from flat position `start` on."""
    plain, positional = _sums(_bits(tensor)).tolist()
    return _combine(name, plain, positional + start * plain)


def tensor_checksums(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return checksums of whole tensors by name, read back from their device all at once."""
    sums = RunningChecksums()
    sums.add(named)
    return sums.read()


def joined_checksum(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return one checksum of many small tensors: that of all of them end to end, in order of name.

    It costs the same few kernels however many there are. Tensors of other element sizes are added up.
    """
    by_size: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        by_size.setdefault(tensor.element_size(), []).append((name, tensor))
    total = 0
    for same in by_size.values():
        joined = torch.cat([_bits(tensor) for _, tensor in same])
        total += tensor_checksum("\n".join(name for name, _ in same), joined)
    return total % 2**64


class RunningChecksums:
    """Checksums of tensors that are added bucket by bucket and read back at the end.

    A GPU computes them in stream order: work queued after `add` may overwrite the tensors.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []  # [tensors of one bucket, 2]

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = []
        for name, tensor in named:
            self._names.append(name)
            tensors.append(tensor.contiguous())
        if tensors:
            self._sums.append(_all_sums(tensors))

    def read(self) -> dict[str, int]:
        rows = torch.cat(self._sums).tolist() if self._sums else []
        return {name: _combine(name, *row) for name, row in zip(self._names, rows, strict=True)}


def format_checksum(value: int) -> str:
    return f"{value:016x}"


def shapes_digest(shapes: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return a digest of tensors' names and shapes that does not depend on their order."""
    lines = sorted(f"{name} {list(shape)}" for name, shape in shapes)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _combine(name: str, plain: int, positional: int) -> int:
    return (plain * _hash(name) + positional * _POSITION_FACTOR) % 2**64


@functools.lru_cache(maxsize=1 << 17)  # enough for two models with thousands of experts
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_BITS[flat.element_size()])


def _all_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return `_sums` of each tensor, [len(tensors), 2], on a GPU in one launch."""
    if not tensors[0].is_cuda or importlib.util.find_spec("triton") is None:
        return torch.stack([_sums(_bits(tensor)) for tensor in tensors])
    from slime.weights.checksum_kernel import many_sums

    sizes = {tensor.element_size() for tensor in tensors}
    if len(sizes) == 1:
        return many_sums(tensors, _BITS[sizes.pop()])
    sums = torch.empty(len(tensors), 2, dtype=torch.int64, device=tensors[0].device)
    for size in sizes:
        rows = [row for row, tensor in enumerate(tensors) if tensor.element_size() == size]
        sums[rows] = many_sums([tensors[row] for row in rows], _BITS[size])
    return sums


def _sums(bits: torch.Tensor) -> torch.Tensor:
    """Return [sum_i b_i, sum_i i * b_i]; int64 wraps around, which is arithmetic modulo 2**64."""
    whole = bits.numel() // _COLUMNS * _COLUMNS
    tail = bits[whole:].to(torch.int64)
    plain = tail.sum()
    positional = (tail * _positions(tail)).sum() + whole * plain
    if whole:
        rows, columns = _reduce(bits[:whole].view(-1, _COLUMNS))
        row_starts = _positions(rows) * _COLUMNS
        plain = plain + rows.sum()
        positional = positional + (rows * row_starts).sum() + (columns * _positions(columns)).sum()
    return torch.stack([plain, positional])


def _reduce(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of rows and of columns in int64."""
    if matrix.device.type != "cpu":
        return matrix.sum(1, dtype=torch.int64), matrix.sum(0, dtype=torch.int64)
    # On a CPU the reduction would first widen the whole matrix in main memory.
    rows = torch.empty(len(matrix), dtype=torch.int64)
    columns = torch.zeros(_COLUMNS, dtype=torch.int64)
    buffer = torch.empty(_CPU_ROWS, _COLUMNS, dtype=torch.int64)
    for block, block_rows in zip(matrix.split(_CPU_ROWS), rows.split(_CPU_ROWS), strict=True):
        wide = buffer[: len(block)].copy_(block)
        torch.sum(wide, 1, out=block_rows)
        columns += wide.sum(0)
    return rows, columns


def _positions(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.numel(), device=like.device, dtype=torch.int64)
