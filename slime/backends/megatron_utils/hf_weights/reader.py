"""Tensors of a Hugging Face folder, read only where asked for."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from slime.utils.errors import UserError

_OPEN_FILES = 4


class TensorReader(Protocol):
    """What loading needs of a source of Hugging Face tensors."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """UserError when there is no such tensor."""
        ...

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        """The part of a tensor that `cuts`, one per leading dimension, leave of it."""
        ...


class HfReader:
    """The safetensors files of a folder, in one file or several with an index."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = _file_of_each_tensor(self.folder)
        self._handles: OrderedDict[str, Any] = OrderedDict()

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        part = self._slice(name)
        return (
            part[cuts]
            if cuts
            else part[:]
            if part.get_shape()
            else self._file(name).get_tensor(name)
        )

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise UserError(f"{self.folder} has no tensor {name}")
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self.folder / file, framework="pt")
        self._handles.move_to_end(file)
        if len(self._handles) > _OPEN_FILES:
            self._handles.popitem(last=False)
        return self._handles[file]


class DictReader:
    """The same of tensors that are in memory."""

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
