"""How Hugging Face tensors form one Megatron tensor, and how that is sharded over ranks.

A mapping defines the shape of a rank's shard, how to read it, how the shards of all ranks join into
the full tensor, and the Hugging Face tensors of the full one. Megatron's linear layers hold
[out, in]: "column" parallel ones are sharded in dimension 0, "row" parallel ones in dimension 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from slime.backends.megatron_utils.hf_weights.reader import TensorReader
from slime.core.errors import UserError

Shape = tuple[int, ...]
Sharding = Literal["column", "row"] | None

_DIM = {"column": 0, "row": 1, None: None}


@dataclass(frozen=True)
class Shard:
    """Index of one of `size` equal shards."""

    rank: int = 0
    size: int = 1
    experts: Shard | None = None  # of dimension 0, in a parameter with all experts of a rank
    expert: int = 0  # whose weight is read from Hugging Face tensors with all experts

    def of(self, length: int) -> slice:
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Shard()


class Mapping(ABC):
    dim: int | None  # sharded dimension, None if every rank holds the full tensor

    def shape(self, shapes: list[Shape], shard: Shard) -> Shape:
        """Return the shape of a rank's shard, from the shapes of the Hugging Face tensors.

        By default the tensors' rows follow one another, sharded.
        """
        return (sum(shape[0] for shape in shapes) // shard.size, *shapes[0][1:])

    @abstractmethod
    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        """Read a rank's shard into `target`."""

    @abstractmethod
    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the Hugging Face tensors, in the order of their names in the rule."""

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.dim is None or len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=self.dim)

    def whole_shape(self, local: Shape, shard: Shard) -> Shape:
        if self.dim is None:
            return local
        return tuple(n * shard.size if dim == self.dim else n for dim, n in enumerate(local))

    def local_rows(self, rows: int, size: int) -> tuple[list[int], int]:
        """Return how many of a shard's rows belong to each Hugging Face tensor, and in how many groups.

        Groups follow one another, and each has its rows of every tensor: with 2 groups and rows
        [4, 2, 2] the order is 2 of the first, 1 of the second, 1 of the third, and the same again.
        """
        return [rows], 1

    def part(self, number: int) -> Mapping:
        """Return the mapping of the rows of one Hugging Face tensor, such as B of its adapter."""
        return Plain("column" if self.dim == 0 else None)


class Plain(Mapping):
    """One tensor that is the same in Hugging Face and Megatron."""

    def __init__(self, sharding: Sharding = None) -> None:
        self.dim = _DIM[sharding]

    def shape(self, shapes: list[Shape], shard: Shard) -> Shape:
        return tuple(n // shard.size if dim == self.dim else n for dim, n in enumerate(shapes[0]))

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        (name,) = names
        slices = []
        if self.dim is not None:
            slices = [*([slice(None)] * self.dim), shard.of(reader.shape(name)[self.dim])]
        target.copy_(reader.read(name, *slices))

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole]


class SwappedInputs(Plain):
    """A column-parallel weight whose input is two halves, in the other order in Hugging Face."""

    def __init__(self) -> None:
        super().__init__("column")

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        super().fill(target, reader, names, shard)
        target.copy_(_swapped(target))

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [_swapped(whole)]


def _swapped(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(weight.shape[1] // 2, dims=1)


class Vocab(Mapping):
    """Rows of the vocabulary, padded with zeros so that every rank holds equally many; `to_hf` cuts the padding."""

    dim = 0

    def __init__(self, rows: int, padded: int) -> None:
        self._rows, self._padded = rows, padded

    def shape(self, shapes: list[Shape], shard: Shard) -> Shape:
        rows, *rest = shapes[0]
        missing = self._padded - self._rows  # added, to detect a table of another size
        return ((rows + missing) // shard.size, *rest)

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        rows = shard.of(self._padded)
        real = slice(min(rows.start, self._rows), min(rows.stop, self._rows))
        count = real.stop - real.start
        target[:count].copy_(reader.read(names[0], real))
        target[count:].zero_()

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[: self._rows]]


class Qkv(Mapping):
    """Fused QKV: query, key and value rows, interleaved by query group (its queries, its key, its value)."""

    dim = 0

    def __init__(self, groups: int, head_dim: int) -> None:
        self._groups, self._head_dim = groups, head_dim

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        if self._groups % shard.size == 0:
            views = self._qkv_views(target, self._groups // shard.size)
            for view, name in zip(views, names, strict=True):
                rows = reader.read(name, shard.of(reader.shape(name)[0]))
                view.copy_(rows.unflatten(0, view.shape[:2]))
            return
        # More ranks than groups: a rank holds a shard of one group.
        whole = target.new_empty(target.shape[0] * shard.size, *target.shape[1:])
        self.fill(whole, reader, names, WHOLE)
        target.copy_(whole[shard.of(whole.shape[0])])

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [view.flatten(0, 1) for view in self._qkv_views(whole, self._groups)]

    def local_rows(self, rows: int, size: int) -> tuple[list[int], int]:
        if self._groups % size:
            raise UserError(
                f"--tensor-model-parallel-size {size} shards the {self._groups} KV heads, which adapters of "
                "q_proj, k_proj and v_proj do not support: choose a divisor, or other --lora-target-modules"
            )
        groups = self._groups // size
        keys = groups * self._head_dim
        return [rows - 2 * keys, keys, keys], groups

    def _qkv_views(self, tensor: torch.Tensor, groups: int) -> list[torch.Tensor]:
        """Return queries, keys and values as views [groups, rows of each, ...]."""
        grouped = tensor.unflatten(0, (groups, -1))
        queries = grouped.shape[1] - 2 * self._head_dim
        return list(grouped.split([queries, self._head_dim, self._head_dim], dim=1))


class GateUp(Mapping):
    """Gate rows followed by up rows; a rank's shard has its rows of each.

    Hugging Face has two tensors or, with `fused`, one.
    """

    dim = 0

    def __init__(self, *, fused: bool = False) -> None:
        self._fused = fused

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        half = reader.shape(names[0])[0] // (2 if self._fused else 1)
        local = shard.of(half)
        for number, rows in enumerate(target.chunk(2)):
            name, start = (names[0], number * half) if self._fused else (names[number], 0)
            rows.copy_(reader.read(name, slice(start + local.start, start + local.stop)))

    def local_rows(self, rows: int, size: int) -> tuple[list[int], int]:
        return ([rows] if self._fused else [rows // 2] * 2), 1

    def part(self, number: int) -> Mapping:
        return self if self._fused else super().part(number)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        halves = [shard.chunk(2) for shard in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole] if self._fused else list(whole.chunk(2))


class InterleavedGateUp(GateUp):
    """Gate and up in one tensor whose rows alternate: gate 0, up 0, gate 1, up 1, ..."""

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        rows = reader.read(names[0], shard.of(reader.shape(names[0])[0]))  # whole pairs
        for number, half in enumerate(target.chunk(2)):
            half.copy_(rows[number::2])

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack(whole.chunk(2), dim=1).flatten(0, 1)]


class StackedExperts(Mapping):
    """Apply a mapping to one expert of tensors [experts, in, out] or biases [experts, out].

    Without `transposed` the tensors are [experts, out, in].
    """

    def __init__(self, inner: Mapping, *, transposed: bool = True) -> None:
        self._inner, self.dim, self._transposed = inner, inner.dim, transposed

    def shape(self, shapes: list[Shape], shard: Shard) -> Shape:
        of_one = [_expert_shape(shape, self._transposed) for shape in shapes]
        return self._inner.shape(of_one, shard)

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        one = ExpertReader(reader, shard.expert, transposed=self._transposed)
        self._inner.fill(target, one, names, shard)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self._inner.join(parts)

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        tensors = self._inner.to_hf(whole)
        return [_transposed(tensor) for tensor in tensors] if self._transposed else tensors


class ExpertReader:
    """Read one expert's tensors as [out, in] and [out]."""

    def __init__(self, reader: TensorReader, expert: int, *, transposed: bool) -> None:
        self._reader, self._expert, self._transposed = reader, expert, transposed

    def shape(self, name: str) -> Shape:
        return _expert_shape(self._reader.shape(name), self._transposed)

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        one = slice(self._expert, self._expert + 1)
        if not self._transposed:
            return self._reader.read(name, one, *slices)[0]
        missing = [slice(None)] * (len(self.shape(name)) - len(slices))
        stored = [one, *reversed([*slices, *missing])]
        return _transposed(self._reader.read(name, *stored)[0])


class ExpertMatrices(Mapping):
    """Matrices of all experts, [E, out, in], of which an expert rank has its experts.

    With `gated` the rows of gate and up are separate, [E, 2, out / 2, in], so that expert-tensor
    ranks have their rows of each.
    """

    def __init__(self, sharding: Sharding = None, *, gated: bool = False) -> None:
        dim = _DIM[sharding]
        self.dim = None if dim is None else dim + (2 if gated else 1)
        self._gated = gated

    def shape(self, shapes: list[Shape], shard: Shard) -> Shape:
        count, rows, columns = shapes[0]
        whole = (count, 2, rows // 2, columns) if self._gated else shapes[0]
        sizes = self._sizes(shard)
        return tuple(n // sizes.get(dim, 1) for dim, n in enumerate(whole))

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        (name,) = names
        assert shard.experts is not None, "of a rule with all experts"
        whole = reader.read(name, shard.experts.of(reader.shape(name)[0]))
        if self._gated:
            whole = whole.unflatten(1, (2, -1))
        if self.dim is not None:
            rows = shard.of(whole.shape[self.dim])
            whole = whole.narrow(self.dim, rows.start, rows.stop - rows.start)
        target.copy_(whole)

    def whole_shape(self, local: Shape, shard: Shard) -> Shape:
        sizes = self._sizes(shard)
        return tuple(n * sizes.get(dim, 1) for dim, n in enumerate(local))

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.flatten(1, 2) if self._gated else whole]

    def _sizes(self, shard: Shard) -> dict[int | None, int]:
        assert shard.experts is not None, "of a rule with all experts"
        return {self.dim: shard.size, 0: shard.experts.size}


def _expert_shape(shape: Shape, transposed: bool) -> Shape:
    return tuple(reversed(shape[1:])) if transposed else shape[1:]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t() if tensor.ndim == 2 else tensor
