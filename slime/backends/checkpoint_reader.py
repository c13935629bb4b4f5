"""Safe reading of torch.distributed.checkpoint files: FSDP's `fsdp/` folder, Megatron's torch_dist.

torch reads `.metadata` with `pickle.load`, and objects inside `.distcp` files with
`torch.load(weights_only=False)`: a malicious checkpoint could execute code when it is loaded. Here
`.metadata` is read by an unpickler that allows only the classes of a tensor index, and objects are
read with `weights_only=True`.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import metadata as shard_metadata
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime.core.errors import ConfigError
from slime.runlog.checkpoint_folder import check_share, damaged

_FILE = ".metadata"
_ENUMS = (
    metadata._MEM_FORMAT_ENCODING,
    shard_metadata.MEM_FORMAT_ENCODING,  # torch < 2.3
    planner.WriteItemType,
)
_CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.StorageMeta,
    shard_metadata.TensorProperties,  # torch < 2.3
    filesystem._StorageInfo,
    # The save plans of all ranks, which megatron-core also stores.
    filesystem._StoragePrefix,
    planner.SavePlan,
    planner.WriteItem,
    planner.TensorWriteData,
    *([planner.BytesIOWriteData] if hasattr(planner, "BytesIOWriteData") else []),
    *_ENUMS,
)


def read_metadata(folder: str | os.PathLike, rank: int | None = None) -> Metadata:
    """Return the index of a checkpoint folder; raise ConfigError if the file is anything else."""
    file = Path(folder) / (_FILE if rank is None else f"__{rank}{_FILE}")
    untouched = [(thing, _attributes(thing)) for thing in _CHANGEABLE]
    try:
        with file.open("rb") as stream:
            found = _MetadataUnpickler(stream, file).load()
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"{file} is damaged: it cannot be read ({error!r})") from None
    finally:
        changed = _restore(untouched)
    if changed:
        raise _refusal(file, f"to change the class {changed}")
    _check_index(found, file)
    if type(found.storage_meta) is not metadata.StorageMeta:
        found.storage_meta = metadata.StorageMeta()
    return found


class DataReader(FileSystemReader):
    """torch's reader of a checkpoint folder, with the safe `read_metadata`, cached."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index is None:
            self._index = read_metadata(self.path, kwargs.get("rank"))
        return self._index

    def refuse_objects(self, names: Iterable[str]) -> None:
        """Raise ConfigError if one of these tensors is stored as a pickled object."""
        stored = self.read_metadata().state_dict_metadata
        for name in names:
            if isinstance(stored.get(name), BytesStorageMetadata):
                file = Path(self.path) / _FILE
                raise ConfigError(
                    f"{file}: {name} is stored as a pickled object and not as a tensor"
                )


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of a stored tensor: one index in each leading dimension, all of the other dimensions.

    Slice(key="experts.fc1", offsets=(3,), shape=(64, 32), dtype=torch.bfloat16)
    is expert 3 of a stored tensor [8, 64, 32].
    """

    key: str
    offsets: tuple[int, ...]  # the index in each leading dimension
    shape: tuple[int, ...]  # of the other dimensions
    dtype: torch.dtype

    @property
    def chunk(self) -> ChunkStorageMetadata:
        rest = len(self.shape)
        return ChunkStorageMetadata(
            offsets=torch.Size([*self.offsets, *[0] * rest]),
            sizes=torch.Size([*[1] * len(self.offsets), *self.shape]),
        )


def read_slices(folder: str | Path, wanted: dict[str, Slice]) -> dict[str, torch.Tensor]:
    """Read slices of tensors without a process group; raise ConfigError if the files lack one."""
    reader = DataReader(folder)
    reader.refuse_objects(one.key for one in wanted.values())
    index = reader.read_metadata()
    plan = _SlicePlanner()
    for name, one in wanted.items():
        stored = index.state_dict_metadata.get(one.key)
        chunk = one.chunk
        items = (
            create_read_items_for_chunk_list(one.key, stored, [chunk])
            if isinstance(stored, TensorStorageMetadata)
            else []
        )
        if not _cover(items, chunk.sizes):
            raise ConfigError(f"{folder} does not hold all of {one.key}, which {name} is read from")
        plan.items += items
        plan.targets[one.key, tuple(chunk.offsets)] = torch.empty(chunk.sizes, dtype=one.dtype)
    reader.set_up_storage_reader(index, is_coordinator=True)
    reader.read_data(LoadPlan(plan.items), plan).wait()
    return {
        name: plan.targets[one.key, tuple(one.chunk.offsets)].view(one.shape)
        for name, one in wanted.items()
    }


def _cover(items: list[planner.ReadItem], sizes: torch.Size) -> bool:
    """Return whether the read items cover the whole slice; overlapping items may leave a hole."""
    if sum(torch.Size(item.lengths).numel() for item in items) != sizes.numel():
        return False
    if len(items) == 1:
        return True
    covered = torch.zeros(sizes, dtype=torch.bool)
    for item in items:
        pairs = zip(item.dest_offsets, item.lengths, strict=True)
        covered[tuple(slice(start, start + length) for start, length in pairs)] = True
    return bool(covered.all())


class _SlicePlanner(DefaultLoadPlanner):
    """Copy what is read to the tensors of `read_slices`."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[planner.ReadItem] = []
        self.targets: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def load_bytes(self, read_item: planner.ReadItem, value: io.BytesIO) -> None:
        raise ConfigError(f"{read_item.dest_index.fqn} is stored as a pickled object")

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.targets[index.fqn, tuple(index.offset or ())]


def refuse_foreign_optimizer(folder: Path) -> None:
    """Raise ConfigError if another tool saved optimizer state, whose step counts are pickled objects."""
    if not (folder / ".metadata").exists():
        raise ConfigError(f"--load {folder} is not a torch_dist checkpoint; slime reads torch_dist")
    names = read_metadata(folder).state_dict_metadata
    if any("optimizer" in name.split(".")[:2] for name in names):
        raise ConfigError(
            f"--load {folder} was written by another tool, with optimizer state that slime cannot load: "
            f"load only its weights, with --ref-load {folder.parent} instead of --load"
        )


def load_object(stream: Any, file: str | os.PathLike, **options: Any) -> Any:
    """Load tensors and plain containers with `torch.load`; raise ConfigError on any other class."""
    try:
        return torch.load(stream, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise _refusal(Path(file), f"to load more than tensors: {_cause(error)}") from None


@contextmanager
def plain_refusals() -> Iterator[None]:
    """Unwrap a ConfigError from CheckpointException, in which torch collects all ranks' errors."""
    try:
        yield
    except CheckpointException as error:
        for failure in error.failures.values():
            if isinstance(failure[0], ConfigError):
                raise failure[0] from None
        raise


class FileCheck:
    """Verify the checksums of a checkpoint's files, with the files divided among ranks.

    `verify` is collective and checks each folder once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._checked: set[str] = set()

    def verify(self, path: str | Path) -> None:
        """Raise ConfigError on every rank if the checksum of a file differs."""
        if str(path) in self._checked:
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        problems: list[str | None] = [None] * world_size
        dist.all_gather_object(problems, check_share(path, rank, world_size), group=self._group)
        if found := next((problem for problem in problems if problem), None):
            raise damaged(Path(path), found)
        self._checked.add(str(path))


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedReader, file: Path) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise _refusal(self._file, f"for {module}.{name}")
        return _ALLOWED[module, name]


def _path(*parts: str) -> str:
    """Replace pathlib.PosixPath: the path that a checkpoint was written to is not used."""
    return os.path.join(*parts) if parts else ""


def _layout(name: str) -> torch.layout:
    layouts = {str(value): value for value in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
    return layouts[name]


def _member(cls: type[Enum], name: str) -> Enum:
    """Replace builtins.getattr, with which Python 3.11.0 to 3.11.3 pickle a member of an Enum."""
    if cls not in _ENUMS:
        raise pickle.UnpicklingError("builtins.getattr on something other than an Enum")
    return cls[name]


_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{("torch", key): value for key, value in vars(torch).items() if type(value) is torch.dtype},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _member,
    **{(module, "PosixPath"): _path for module in ("pathlib", "pathlib._local")},
    # megatron-core before 0.16 had its own classes for the index and its save plans.
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): planner.SavePlan,
}


_CHANGEABLE: tuple[Any, ...] = (*_CLASSES, *(member for enum in _ENUMS for member in enum))


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes a pickle could set; `vars` of a class does not have its names."""
    names = ("__name__", "__qualname__") if isinstance(thing, type) else ()
    return {**vars(thing), **{name: getattr(thing, name) for name in names}}


def _restore(untouched: list[tuple[Any, dict[str, Any]]]) -> str | None:
    """Undo a pickle's changes to the allowed classes; return the name of one that was changed.

    The BUILD opcode, which sets the attributes of an object, also works on a class.
    """
    changed = None
    for thing, before in untouched:
        now = _attributes(thing)
        for key in now.keys() | before.keys():
            if key not in before:
                delattr(thing, key)
            elif now.get(key) is not before[key]:
                setattr(thing, key, before[key])
            else:
                continue
            cls = thing if isinstance(thing, type) else type(thing)
            changed = f"{cls.__module__}.{before.get('__qualname__', cls.__qualname__)}"
    return changed


def _check_index(found: Any, file: Path) -> None:
    if type(found) is not Metadata or not isinstance(found.state_dict_metadata, dict):
        raise ConfigError(f"{file} is not the index of a checkpoint")
    for key, value in found.state_dict_metadata.items():
        if type(key) is not str or type(value) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise ConfigError(
                f"{file} is not the index of a checkpoint: it has a {type(value).__name__}"
            )
    for place in (found.storage_data or {}).values():
        name = getattr(place, "relative_path", None)
        if type(name) is not str or os.path.isabs(name) or ".." in Path(name).parts:
            shown = repr(name[:80]) if type(name) is str else f"of a {type(name).__name__}"
            raise _refusal(file, f"to read the file {shown}, outside its folder")


def _refusal(file: Path, request: str) -> ConfigError:
    return ConfigError(
        f"{file} asks {request}. No checkpoint needs that, and it could run code here: nothing was "
        "loaded. Load checkpoints of your own runs, or weights as safetensors"
    )


def _cause(error: Exception) -> str:
    """Return the line of torch's message that names the class, without its hints on allowing it."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "global" in line), lines[0]).rstrip(
        "."
    )
