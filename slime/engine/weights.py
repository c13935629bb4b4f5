"""In-place weight updates: from disk, from shared memory or CUDA IPC, over a process group."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from slime.config.checks.model_types import TOWER, in_tower
from slime.engine.scheduler.sampling_params import RequestError
from slime.weights.buckets import StoredNames, hf_views, stored_names
from slime.weights.checksum import tensor_checksums
from slime.weights.ipc import ImportedBuffers, finish_reading
from slime.weights.process_group import destroy_side_group, init_side_group

_NOT_SERVED = ("mtp.", TOWER)  # MTP layers, and the vision tower of a model loaded as text-only


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """One tensor of a bucket: its bytes start at `offset`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Views:
    """Views of a model's weights under checkpoint names, valid while `addresses` are those of the parameters.
    `names` has a tied weight once, under its first name."""

    addresses: list[int]
    by_name: dict[str, torch.Tensor]
    names: list[str]


class WeightStore:
    """The live parameters under their checkpoint names; writing to them changes the model."""

    def __init__(self, model: PreTrainedModel, model_path: str = "") -> None:
        self._model = model
        self._model_type: str = model.config.model_type
        has_names = any(Path(model_path).glob("*.safetensors"))  # else random weights
        self._stored = stored_names(model_path, self._model_type) if has_names else StoredNames()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._weights: dict[str, torch.Tensor] = {}  # by module name; released memory keeps them
        self._cached_views: _Views | None = None  # while a session is open
        self._imported = ImportedBuffers()
        self.session_open = False
        self.tower_changed = False  # since its reader set it to False

    def begin_session(self) -> None:
        if self.session_open:
            raise RequestError(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self.session_open = True
        self._views()  # overlaps with the trainer making the first bucket

    def end_session(self) -> None:
        if not self.session_open:
            raise RequestError("end_weight_update() without begin_weight_update()")
        self.session_open = False
        self.invalidate()
        self._imported.close()

    def invalidate(self) -> None:
        """Drop the views of the weights, which would keep their memory from being released."""
        self._cached_views = None

    def require_session(self, route: str) -> None:
        if not self.session_open:
            raise RequestError(
                f"{route} must run between begin_weight_update() and end_weight_update()"
            )

    def update_from_disk(self, model_path: str) -> None:
        """Load every parameter from a checkpoint folder; nothing is written unless all shapes match.

        A checkpoint without vision tower weights updates only the language model.
        """
        try:
            self._read_folder(model_path)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"the weights in {model_path} cannot be read: {error}") from error

    def _read_folder(self, model_path: str) -> None:
        cached = self._views()
        views, files = cached.by_name, _find_tensors(Path(model_path))
        with_tower = any(in_tower(name) for name in files)
        missing = [
            name
            for name in cached.names
            if name not in files and (with_tower or not in_tower(name))
        ]
        unknown = [
            name
            for name in files
            if name not in views and not name.endswith("rotary_emb.inv_freq")
            if not name.startswith(_NOT_SERVED)
        ]
        if missing or unknown:
            raise RequestError(
                f"{model_path} is not a checkpoint of this model: {missing[:3]} are missing "
                f"and {unknown[:3]} are not in the model"
            )
        by_file: dict[Path, list[str]] = {}
        for name in files.keys() & views.keys():
            by_file.setdefault(files[name], []).append(name)
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    _check_shape(name, tuple(file.get_slice(name).get_shape()), views[name])
        self.tower_changed |= with_tower
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    views[name].copy_(file.get_tensor(name))

    def update_from_buffer(self, handle: Any, metas: Sequence[TensorMeta]) -> None:
        """Copy a bucket from memory shared by another process of this machine.

        The buffer has been read when this returns, and stays mapped until the session ends.
        """
        targets = self._destinations(metas)
        with self._open_buffer(handle) as buffer:
            _copy_bucket(buffer, metas, targets)

    def read_buffer(self, handle: Any, metas: Sequence[TensorMeta]) -> dict[str, torch.Tensor]:
        """Return copies of tensors in memory shared by another process, such as those of an adapter."""
        with self._open_buffer(handle) as buffer:
            copy = torch.empty_like(buffer, device=self._model.device).copy_(buffer)
        return named_views(copy, metas)

    @contextlib.contextmanager
    def _open_buffer(self, handle: Any) -> Iterator[torch.Tensor]:
        try:
            buffer = self._imported.get(handle)
        except (KeyError, TypeError, OSError, ValueError) as error:
            raise RequestError(f"cannot open the shared buffer: {error}") from error
        try:
            yield buffer
        finally:
            finish_reading(buffer)
            if not self.session_open:
                self._imported.close()

    def read_group(self, metas: Sequence[TensorMeta], group_name: str) -> dict[str, torch.Tensor]:
        """Return tensors that rank 0 of the group broadcasts as one byte buffer."""
        return named_views(self._receive(metas, self._group(group_name)), metas)

    def _receive(self, metas: Sequence[TensorMeta], group: dist.ProcessGroup) -> torch.Tensor:
        size = sum(meta.num_bytes for meta in metas)
        buffer = torch.empty(size, dtype=torch.uint8, device=self._model.device)
        dist.broadcast(buffer, group=group, group_src=0)
        return buffer

    def init_group(
        self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str
    ) -> None:
        if name in self._groups:
            raise RequestError(f"weight update group {name!r} already exists")
        self._groups[name] = init_side_group(
            f"tcp://{address}:{port}", rank, world_size, backend, name
        )

    def destroy_group(self, name: str) -> None:
        destroy_side_group(self._group(name))
        del self._groups[name]

    def update_from_group(
        self, metas: list[TensorMeta], group_name: str, *, flattened: bool
    ) -> None:
        """Receive a broadcast of rank 0 of the group: one tensor per name, or all of them as one byte buffer."""
        group = self._group(group_name)
        targets = self._destinations(metas)
        if flattened:
            _copy_bucket(self._receive(metas, group), metas, targets)
            return
        for meta, target in zip(metas, targets, strict=True):
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self._model.device)
            dist.broadcast(tensor, group=group, group_src=0)
            target.copy_(tensor)

    def checksums(self) -> dict[str, int]:
        views = self._views()
        return tensor_checksums([(name, views.by_name[name]) for name in views.names])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers, cached: state_dict takes longer than copying a bucket."""
        if not self._weights:
            found = self._model.state_dict(keep_vars=True).items()
            self._weights = {name: t for name, t in found if isinstance(t, torch.Tensor)}
        return self._weights

    def _views(self) -> _Views:
        """Return the views, cached during a session unless the parameters moved."""
        addresses = [tensor.data_ptr() for tensor in self._tensors().values()]
        if self._cached_views is not None and self._cached_views.addresses == addresses:
            return self._cached_views
        by_name: dict[str, torch.Tensor] = {}
        names: list[str] = []
        seen: set[int] = set()
        for name, tensor in self._tensors().items():
            named = [(name, tensor.detach())]
            views = dict(hf_views(named, model_type=self._model_type, stored=self._stored))
            by_name.update(views)
            if id(tensor) not in seen:
                names.extend(views)
            seen.add(id(tensor))
        made = _Views(addresses=addresses, by_name=by_name, names=names)
        self._cached_views = made if self.session_open else None
        return made

    def _destinations(self, metas: Iterable[TensorMeta]) -> list[torch.Tensor]:
        """Return the destination of each tensor; raise RequestError unless all names and shapes match."""
        views = self._views().by_name
        targets: list[torch.Tensor] = []
        for meta in metas:
            self.tower_changed |= in_tower(meta.name)
            if meta.name not in views:
                raise RequestError(f"the model has no parameter {meta.name!r}")
            targets.append(views[meta.name])
            _check_shape(meta.name, meta.shape, targets[-1])
        return targets

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise RequestError(
                f"no weight update group {name!r}; call init_weights_update_group first"
            )
        return self._groups[name]


def parse_metadata(entries: Any) -> Sequence[TensorMeta]:
    """Parse the `metadata` of a slime_shm update."""
    if not isinstance(entries, list):
        raise RequestError("metadata must be a list of {name, dtype, shape, offset}")
    try:
        text = orjson.dumps(entries)
    except orjson.JSONEncodeError as error:  # nested too deeply
        raise RequestError(f"metadata must be a list of flat objects: {error}") from None
    return _parse_entries(text)


def _parse_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise RequestError(f"a shape must be a list of sizes, got {str(shape)[:100]!r}")
    return tuple(shape)


@lru_cache(maxsize=256)  # a run sends the same buckets in every update
def _parse_entries(text: bytes) -> tuple[TensorMeta, ...]:
    entries = orjson.loads(text)
    try:
        return tuple(
            TensorMeta(
                name=str(entry["name"]),
                dtype=parse_dtype(entry["dtype"]),
                shape=_parse_shape(entry["shape"]),
                offset=int(entry["offset"]),
            )
            for entry in entries
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"metadata must be a list of {{name, dtype, shape, offset}}: {error!r}"
        ) from error


def metadata_in_order(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> list[TensorMeta]:
    """Return the metadata of contiguous tensors, as in a flattened bucket."""
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
    metas: list[TensorMeta] = []
    offset = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        metas.append(
            TensorMeta(
                name=str(name), dtype=parse_dtype(dtype), shape=_parse_shape(shape), offset=offset
            )
        )
        offset += metas[-1].num_bytes
    return metas


def _copy_bucket(
    buffer: torch.Tensor, metas: Sequence[TensorMeta], targets: list[torch.Tensor]
) -> None:
    if targets:
        sent = [v.view_as(t) for v, t in zip(_views_of(buffer, metas), targets, strict=True)]
        torch._foreach_copy_(targets, sent)  # pyright: ignore[reportPrivateImportUsage]


def named_views(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> dict[str, torch.Tensor]:
    """Return the tensors of a buffer by name, as views of it."""
    views = zip(metas, _views_of(buffer, metas), strict=True)
    made = {meta.name: view.view(meta.shape) for meta, view in views}
    if len(made) < len(metas):
        raise RequestError("a tensor was sent twice")
    return made


def _views_of(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
    whole = {dtype: _elements(buffer, dtype) for dtype in {meta.dtype for meta in metas}}
    sent: list[torch.Tensor] = []
    for meta in metas:
        size, end = meta.dtype.itemsize, meta.offset + meta.num_bytes
        if not 0 <= meta.offset <= end <= buffer.numel():
            raise RequestError(f"{meta.name}: bytes {meta.offset}..{end} lie outside the buffer")
        if meta.offset % size:
            data = buffer[meta.offset : end].clone().view(meta.dtype)
        else:
            data = whole[meta.dtype][meta.offset // size : end // size]
        sent.append(data)
    return sent


def _elements(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the whole elements of a byte buffer as `dtype`."""
    return buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"unknown dtype {name!r}")
    return dtype


def _check_shape(name: str, shape: tuple[int, ...], view: torch.Tensor) -> None:
    if tuple(view.shape) != shape:
        raise RequestError(
            f"{name}: shape {list(shape)} was sent, the model has {list(view.shape)}"
        )


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return {str(name): folder / file for name, file in weight_map.items()}
        except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise RequestError(f"{index} is not an index of tensors: {error!r}") from error
    single = folder / "model.safetensors"
    with contextlib.suppress(FileNotFoundError), safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
    raise RequestError(f"no model.safetensors or model.safetensors.index.json in {folder}")
