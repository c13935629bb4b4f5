"""The index of a checkpoint is data: what else a pickle asks for is refused by name."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType

from slime.backends import checkpoint_reader
from slime.backends.checkpoint_reader import (
    DataReader,
    load_object,
    read_metadata,
)
from slime.core.errors import ConfigError
from tests import hostile

GLOBAL = b"\x80\x02c%s\n%s\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one process, as torch writes it."""
    tensors = {
        "whole": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "count": torch.tensor(3),
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def test_an_index_that_torch_wrote_is_read_as_torch_reads_it(folder):
    ours, theirs = DataReader(folder).read_metadata(), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    tensors = {"whole": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(tensors, storage_reader=DataReader(folder), no_dist=True)
    assert torch.equal(tensors["whole"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tensors["half"], torch.ones(2, dtype=torch.bfloat16))


def test_a_payload_in_the_index_is_not_run_and_its_class_is_named(folder, tmp_path):
    assert hostile.works(tmp_path)
    hostile.hostile_index(folder, tmp_path / "marker")
    with pytest.raises(ConfigError) as caught:
        read_metadata(folder)
    assert str(folder / ".metadata") in str(caught.value)
    assert hostile.ASKED_FOR in str(caught.value)
    assert not (tmp_path / "marker").exists()


def test_an_index_of_one_rank_is_read_the_same_way(folder, tmp_path):
    """torch falls back to it where `.metadata` cannot be read."""
    hostile.hostile_index(folder, tmp_path / "marker")
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(ConfigError, match=hostile.ASKED_FOR):
        DataReader(folder).read_metadata(rank=0)
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"whole": torch.zeros(2, 3)}, storage_reader=DataReader(folder), no_dist=True)
    assert not (tmp_path / "marker").exists()


def test_an_object_in_place_of_a_tensor_is_refused(folder, tmp_path):
    hostile.hostile_object(folder, "whole", tmp_path / "marker")
    with pytest.raises(ConfigError, match="whole is stored as a pickled object"):
        DataReader(folder).refuse_objects(["half", "whole"])
    DataReader(folder).refuse_objects(["half"])


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "builtins exec",
        "builtins __import__",
        "os system",
        "torch load",
        "torch.serialization load",
        "torch.storage _load_from_bytes",
        "torch._utils _rebuild_tensor_v2",
        "torch.distributed.checkpoint.metadata os",
        "torch.distributed.checkpoint.metadata os.system",
        "torch.distributed.checkpoint.filesystem FileSystemReader",
        "collections defaultdict",
        "pathlib Path.open",
        "functools partial",
        "operator attrgetter",
    ],
)
def test_nothing_outside_the_list_is_found(tmp_path, name):
    module, attribute = name.split()
    # Protocol 4 looks dotted names up attribute by attribute.
    words = b"".join(b"\x8c" + struct.pack("B", len(w)) + w.encode() for w in (module, attribute))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + words + b"\x93.")
    with pytest.raises(ConfigError, match=f"asks for {module}.{attribute}"):
        read_metadata(tmp_path)


def test_the_list_holds_classes_dtypes_and_own_functions_only():
    for value in checkpoint_reader._ALLOWED.values():
        own = getattr(value, "__module__", None) == checkpoint_reader.__name__
        assert own or isinstance(value, type | torch.dtype), value


def test_getattr_reaches_members_of_enums_only(tmp_path):
    """Python 3.11.0 to 3.11.3 pickle an Enum by it."""
    module = b"torch.distributed.checkpoint.metadata"
    reach = GLOBAL % (b"builtins", b"getattr") + b"c%s\n%s\nX%s%s\x86R."

    def index(cls: bytes, name: bytes) -> None:
        words = module, cls, struct.pack("<I", len(name)), name
        (tmp_path / ".metadata").write_bytes(reach % words)

    index(b"_MEM_FORMAT_ENCODING", b"TORCH_CHANNELS_LAST")
    with pytest.raises(ConfigError, match="is not the index of a checkpoint"):  # but it was read
        read_metadata(tmp_path)
    for name in (b"__init__", b"__class__"):
        index(b"Metadata", name)
        with pytest.raises(ConfigError, match=r"builtins\.getattr"):
            read_metadata(tmp_path)


def test_a_pickle_cannot_change_the_classes(tmp_path):
    before = dict(vars(metadata.Metadata))
    change = b"N}X\x08\x00\x00\x00__init__X\x01\x00\x00\x00xX\x03\x00\x00\x00newK\x01u\x86b."
    change = change.replace(b"}X", b"}(X")
    index = GLOBAL % (b"torch.distributed.checkpoint.metadata", b"Metadata") + change
    (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(ConfigError, match=r"to change the class .*metadata\.Metadata"):
        read_metadata(tmp_path)
    assert dict(vars(metadata.Metadata)) == before


@pytest.mark.parametrize(
    "index",
    [
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__qualname__'\nS'Other'\nstb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__name__'\nS'Other'\nstb.",
        b"ctorch.distributed.checkpoint.planner\nWriteItemType\n(I1\ntR(N}S'_value_'\nI2\nstb.",
        b"ctorch.distributed.checkpoint.planner\nWriteItemType\n(I1\ntR}S'_value_'\nI2\nsb.",
    ],
)
def test_a_pickle_cannot_change_names_and_members(tmp_path, index):
    """With another name, for one, no checkpoint could be saved any more."""
    (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(ConfigError, match="to change the class torch"):
        read_metadata(tmp_path)
    assert (metadata.Metadata.__name__, metadata.Metadata.__qualname__) == ("Metadata", "Metadata")
    assert [member.value for member in WriteItemType] == [1, 2, 3]


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/__0_0.distcp", 3])
def test_files_outside_the_folder_are_not_read(folder, name):
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.storage_data[next(iter(index.storage_data))] = _StorageInfo(name, 0, 1)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ConfigError, match="outside its folder"):
        read_metadata(folder)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1})])
def test_what_is_no_index_is_named(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/\.metadata is (damaged|not the index)"):
        read_metadata(tmp_path)


@pytest.mark.timeout(60)
def test_a_small_index_does_not_become_a_large_message(folder):
    """Lists that hold each other twice: 300 bytes, and 2^60 brackets if they were written out."""
    nested: list = []
    for _ in range(60):
        nested = [nested, nested]
    with pytest.raises(ConfigError, match="it has a list"):
        read_metadata(_written(folder, metadata.Metadata(state_dict_metadata={"a": nested})))
    place = _StorageInfo(relative_path=nested, offset=0, length=1)
    with pytest.raises(ConfigError, match="the file of a list, outside"):
        read_metadata(_written(folder, metadata.Metadata({}, storage_data={0: place})))


def _written(folder, index):
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def test_indexes_of_older_megatron_and_torch_are_read(folder):
    """Written with other names, the fields are the same."""
    data = (folder / ".metadata").read_bytes()
    index = pickle.loads(data)
    names = {
        ("torch.distributed.checkpoint.metadata", "Metadata"): (
            "megatron.core.dist_checkpointing.strategies.torch",
            "MCoreMetadata",
        ),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"): (
            "torch.distributed._shard.sharded_tensor.metadata",
            "TensorProperties",
        ),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): (
            "torch.distributed._shard.sharded_tensor.metadata",
            "MEM_FORMAT_ENCODING",
        ),
    }
    (folder / ".metadata").write_bytes(_with_other_names(index, names))
    old = read_metadata(folder)
    assert old.state_dict_metadata.keys() == index.state_dict_metadata.keys()
    assert old.state_dict_metadata["whole"].properties.dtype == torch.float32
    assert old.storage_data == index.storage_data


def _with_other_names(index: metadata.Metadata, names: dict) -> bytes:
    """Pickle with protocol 2, in which a class is a line of text."""
    data = pickle.dumps(index, protocol=2)
    for old, new in names.items():
        data = data.replace(
            b"c" + "\n".join(old).encode() + b"\n", b"c" + "\n".join(new).encode() + b"\n"
        )
    return data


def test_objects_of_torch_save_are_tensors_and_containers(tmp_path):
    buffer = io.BytesIO()
    torch.save(OrderedDict(cpu=torch.ones(2)), buffer)
    buffer.seek(0)
    assert torch.equal(load_object(buffer, "x")["cpu"], torch.ones(2))
    for zipped in (True, False):
        torch.save(
            {"cpu": hostile.Payload(tmp_path / "marker")},
            tmp_path / "rng_0.pt",
            _use_new_zipfile_serialization=zipped,
        )
        with pytest.raises(ConfigError) as caught:
            load_object(tmp_path / "rng_0.pt", tmp_path / "rng_0.pt")
        assert f"{tmp_path}/rng_0.pt" in str(caught.value)
        assert hostile.ASKED_FOR in str(caught.value)
    assert not (tmp_path / "marker").exists()
    assert os.listdir(tmp_path) == ["rng_0.pt"]


def test_an_index_whose_chunks_leave_a_hole_is_refused(folder):
    index = FileSystemReader(folder).read_metadata()
    entry = index.state_dict_metadata["whole"]
    assert isinstance(entry, metadata.TensorStorageMetadata)
    first = metadata.ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([1, 3]))
    entry.chunks[:] = [first, first]  # as many elements as the tensor has, and half of them twice
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    wanted = checkpoint_reader.Slice(key="whole", offsets=(), shape=(2, 3), dtype=torch.float32)
    with pytest.raises(ConfigError, match="does not hold all of whole"):
        checkpoint_reader.read_slices(folder, {"w": wanted})
