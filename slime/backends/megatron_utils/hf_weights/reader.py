"""Read tensors of a Hugging Face folder lazily, slice by slice, dequantized if they are quantized."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from slime.core.errors import UserError
from slime.weights.fp8 import FP8, dequantize
from slime.weights.fp8_format import Fp8Format, format_of, refuse_unreadable

_OPEN_FILES = 4
_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS = 127  # of the exponents that scale blocks of FP4 values
_FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class TensorReader(Protocol):
    """A source of Hugging Face tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape; raise UserError if there is no such tensor."""
        ...

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        """Return the slice of a tensor given by `slices`, one per leading dimension."""
        ...


class HfReader:
    """Read the weights of a folder, dequantized if they are stored in FP8 or MXFP4."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = _SafetensorFiles(self.folder)
        self._formats = stored_formats(self._files.names(), _fp8_format(self.folder))
        hidden = {part for name, kind in self._formats.items() for part in kind.parts(name)}
        self._names = [name for name in self._files.names() if name not in hidden]
        self._names += self._formats

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        kind = self._formats.get(name)
        return self._files.shape(name) if kind is None else kind.shape(self._files, name)

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        kind = self._formats.get(name)
        if kind is not None:
            return kind.read(self._files, name, slices)
        tensor = self._files.read(name, *slices)
        if tensor.dtype == FP8:
            raise UserError(
                f"{self.folder}: {name} is in FP8 and has no scales, or config.json has no "
                "quantization_config that names them: convert or download the checkpoint again"
            )
        return tensor


class _SafetensorFiles:
    """Read one safetensors file or several with an index; only a few are open at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _file_of_each_tensor(folder)
        self._handles: OrderedDict[str, Any] = OrderedDict()

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        file = self._file(name)
        return file.get_slice(name)[slices] if slices else file.get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise UserError(f"{self._folder} has no tensor {name}")
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self._folder / file, framework="pt")
        self._handles.move_to_end(file)
        if len(self._handles) > _OPEN_FILES:
            self._handles.popitem(last=False)
        return self._handles[file]


def _fp8_format(folder: Path) -> Fp8Format | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    refuse_unreadable(folder, config)
    return format_of(config)


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        for file in sorted(set(files.values())):
            if not (folder / file).is_file():
                raise UserError(f"{folder} is incomplete: {file}, named in its index, is missing")
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(
            f"{folder} has no safetensors weights: neither {index.name} nor {single.name}"
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


# ---- storage formats


class StorageFormat(Protocol):
    """A storage format; `parts` are the names in the files, which the reader hides."""

    def parts(self, name: str) -> list[str]: ...

    def shape(self, tensors: TensorReader, name: str) -> tuple[int, ...]: ...

    def read(self, tensors: TensorReader, name: str, slices: tuple[slice, ...]) -> torch.Tensor: ...


class Mxfp4:
    """Read [experts, in, out] from FP4 pairs [experts, out, in / 32, 16] and an exponent per 32."""

    def parts(self, name: str) -> list[str]:
        return [name + _BLOCKS, name + _SCALES]

    def shape(self, tensors: TensorReader, name: str) -> tuple[int, ...]:
        experts, rows, groups, size = tensors.shape(name + _BLOCKS)
        return (experts, groups * size * 2, rows)

    def read(self, tensors: TensorReader, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        first, rest = slices[:1], slices[1:]
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
        return [name, self._layout.scale_name(name)]

    def shape(self, tensors: TensorReader, name: str) -> tuple[int, ...]:
        return tensors.shape(name)

    def read(self, tensors: TensorReader, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        weight, scale = (tensors.read(part) for part in self.parts(name))
        return dequantize(weight, scale, self._layout)[slices].to(torch.bfloat16)


def stored_formats(names: Iterable[str], fp8: Fp8Format | None) -> dict[str, StorageFormat]:
    """Return the format of each quantized tensor, by its name after dequantization."""
    names = set(names)
    formats: dict[str, StorageFormat] = {
        name.removesuffix(_BLOCKS): Mxfp4() for name in names if name.endswith(_BLOCKS)
    }
    if fp8 is not None:
        quantized = Fp8(fp8)
        weights = (name for name in names if name.endswith(".weight"))
        formats |= {name: quantized for name in weights if set(quantized.parts(name)) <= names}
    return formats
