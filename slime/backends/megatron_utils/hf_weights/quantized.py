"""Read and dequantize weights that a checkpoint stores in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from slime.weights.fp8 import Fp8Format, dequantize

_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS = 127  # of the exponents that scale blocks of FP4 values
_FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Tensors(Protocol):
    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, *cuts: slice) -> torch.Tensor: ...


class Stored(Protocol):
    """A storage format; `parts` are the names in the files, which the reader hides."""

    def parts(self, name: str) -> list[str]: ...

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]: ...

    def read(self, tensors: Tensors, name: str, cuts: tuple[slice, ...]) -> torch.Tensor: ...


class Mxfp4:
    """Read [experts, in, out] from FP4 pairs [experts, out, in / 32, 16] and an exponent per 32."""

    def parts(self, name: str) -> list[str]:
        return [name + _BLOCKS, name + _SCALES]

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        experts, rows, groups, size = tensors.shape(name + _BLOCKS)
        return (experts, groups * size * 2, rows)

    def read(self, tensors: Tensors, name: str, cuts: tuple[slice, ...]) -> torch.Tensor:
        first, rest = cuts[:1], cuts[1:]
        blocks = tensors.read(name + _BLOCKS, *first)
        scales = tensors.read(name + _SCALES, *first)
        values = torch.tensor([*_FOUR_BITS, *(-value for value in _FOUR_BITS)])
        pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        numbers = torch.ldexp(values[pairs.int()], (scales.int() - _BIAS)[..., None])
        return numbers.flatten(-2).transpose(1, 2)[(slice(None), *rest)].to(torch.bfloat16)


class Fp8:
    def __init__(self, layout: Fp8Format) -> None:
        self._layout = layout

    def parts(self, name: str) -> list[str]:
        return [name, name.removesuffix("weight") + self._layout.scale_suffix]

    def shape(self, tensors: Tensors, name: str) -> tuple[int, ...]:
        return tensors.shape(name)

    def read(self, tensors: Tensors, name: str, cuts: tuple[slice, ...]) -> torch.Tensor:
        weight, scale = (tensors.read(part) for part in self.parts(name))
        return dequantize(weight, scale, self._layout)[cuts].to(torch.bfloat16)


def stored_formats(names: Iterable[str], fp8: Fp8Format | None) -> dict[str, Stored]:
    """Return the format of each quantized tensor, by its name after dequantization."""
    names = set(names)
    formats: dict[str, Stored] = {
        name.removesuffix(_BLOCKS): Mxfp4() for name in names if name.endswith(_BLOCKS)
    }
    if fp8 is not None:
        quantized = Fp8(fp8)
        weights = (name for name in names if name.endswith(".weight"))
        formats |= {name: quantized for name in weights if set(quantized.parts(name)) <= names}
    return formats
