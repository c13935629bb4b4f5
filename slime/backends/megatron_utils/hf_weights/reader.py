"""Read tensors of a Hugging Face folder lazily, slice by slice."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from slime.backends.megatron_utils.hf_weights.quantized import stored_formats
from slime.core.errors import UserError
from slime.weights.fp8 import Fp8Format, format_of

_OPEN_FILES = 4


class TensorReader(Protocol):
    """A source of Hugging Face tensors."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape; raise UserError if there is no such tensor."""
        ...

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        """Return the slice of a tensor given by `cuts`, one per leading dimension."""
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

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        kind = self._formats.get(name)
        return self._files.read(name, *cuts) if kind is None else kind.read(self._files, name, cuts)


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

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        file = self._file(name)
        return file.get_slice(name)[cuts] if cuts else file.get_tensor(name)

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


class DictReader:
    """Read tensors that are in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name).shape)

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        return self._get(name)[cuts] if cuts else self._get(name)

    def _get(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise UserError(f"there is no tensor {name}")
        return self._tensors[name]


def _fp8_format(folder: Path) -> Fp8Format | None:
    config = folder / "config.json"
    return format_of(json.loads(config.read_text())) if config.is_file() else None


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
