"""Mappings of gated delta nets and gated attention: rows of several kinds in one Megatron tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.backends.megatron_utils.hf_weights.mappings import Mapping, Plain, Qkv, Shard
from slime.backends.megatron_utils.hf_weights.reader import TensorReader


class Sections(Mapping):
    """Sections of rows, such as queries, keys and values; a rank's shard has its rows of each.

    `tensors` are the numbers of rows of the sections in each Hugging Face tensor. These have one section
    after the other or, with `groups`, the rows of each group of heads side by side: two groups of
    sections [4, 2] are 2 of the first section, 1 of the second, and the same again.
    """

    dim = 0

    def __init__(self, *tensors: Sequence[int], groups: int | None = None) -> None:
        self._tensors, self._groups = tensors, groups
        self._sizes = [rows for sizes in tensors for rows in sizes]

    def local_sizes(self, size: int) -> list[int]:
        """Return how many rows a shard has of each section."""
        return [rows // size for rows in self._sizes]

    def local_rows(self, rows: int, size: int) -> tuple[list[int], int]:
        return [sum(sizes) // size for sizes in self._tensors], 1

    def part(self, number: int) -> Mapping:
        return Sections(self._tensors[number], groups=self._groups)

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        sections = iter(target.split(self.local_sizes(shard.size)))
        for name, sizes in zip(names, self._tensors, strict=True):
            for rows in self._read(reader, name, sizes, shard):
                next(sections).copy_(rows)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        sizes = self.local_sizes(len(parts))
        of_each = zip(*(part.split(sizes) for part in parts), strict=True)
        return torch.cat([rows for section in of_each for rows in section])

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        sections = iter(whole.split(self._sizes))
        return [self._joined([next(sections) for _ in sizes]) for sizes in self._tensors]

    def _read(
        self, reader: TensorReader, name: str, sizes: Sequence[int], shard: Shard
    ) -> list[torch.Tensor]:
        """Return a rank's rows of the sections of one Hugging Face tensor."""
        if self._groups is not None:
            rows = reader.read(name, shard.of(sum(sizes)))
            grouped = rows.unflatten(0, (self._groups // shard.size, -1))
            parts = grouped.split([rows // self._groups for rows in sizes], dim=1)
            return [part.flatten(0, 1) for part in parts]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        slices = [(start, shard.of(rows)) for start, rows in zip(starts, sizes, strict=True)]
        return [reader.read(name, slice(at + s.start, at + s.stop)) for at, s in slices]

    def _joined(self, sections: list[torch.Tensor]) -> torch.Tensor:
        if self._groups is None:
            return torch.cat(sections)
        parts = [section.unflatten(0, (self._groups, -1)) for section in sections]
        return torch.cat(parts, dim=1).flatten(0, 1)


class GatedQkv(Qkv):
    """`Qkv` of queries with gates: Hugging Face has both of each head, Megatron a group's gates last."""

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        super().fill(target, reader, names, shard)
        if self._groups % shard.size == 0:  # else `super().fill` sliced a reordered whole tensor
            queries = self._qkv_views(target, self._groups // shard.size)[0]
            of_heads = queries.unflatten(1, (-1, 2, self._head_dim))
            queries.copy_(of_heads.transpose(1, 2).flatten(1, 3))

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        queries, keys, values = super().to_hf(whole)
        return [_by_head(queries, self._groups, self._head_dim), keys, values]

    def part(self, number: int) -> Mapping:
        return super().part(number) if number else GatedQueries(self._groups, self._head_dim)


class GatedQueries(Plain):
    """The queries and gates of `GatedQkv` alone; tensor ranks have whole groups of them."""

    def __init__(self, groups: int, head_dim: int) -> None:
        super().__init__("column")
        self._groups, self._head_dim = groups, head_dim

    def fill(
        self, target: torch.Tensor, reader: TensorReader, names: list[str], shard: Shard
    ) -> None:
        super().fill(target, reader, names, shard)
        of_heads = target.unflatten(0, (self._groups // shard.size, -1, 2, self._head_dim))
        target.copy_(of_heads.transpose(1, 2).flatten(0, 3))

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [_by_head(whole, self._groups, self._head_dim)]


def _by_head(queries: torch.Tensor, groups: int, head_dim: int) -> torch.Tensor:
    """Return the rows of queries and gates head by head, of rows that have a group's gates last."""
    return queries.unflatten(0, (groups, 2, -1, head_dim)).transpose(1, 2).flatten(0, 3)
