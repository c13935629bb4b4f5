"""Files whose unpickling would run a command, and indexes of checkpoints that point to them."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex


class Payload:
    """Unpickled, it makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


ASKED_FOR = "posix.mkdir"


def works(folder: Path) -> bool:
    """Whether the payload does what it is meant to do where it is unpickled."""
    marker = folder / "proof"
    pickle.loads(pickle.dumps(Payload(marker)))
    return marker.exists()


def hostile_index(folder: Path, marker: Path) -> None:
    """Replace `.metadata` by a payload."""
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(marker)))


def hostile_object(folder: Path, name: str, marker: Path) -> None:
    """Have an honest `.metadata` say that `name` is an object, which is a payload."""
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    (folder / "__9_0.distcp").write_bytes(buffer.getvalue())
    index.state_dict_metadata[name] = BytesStorageMetadata()
    place = _StorageInfo("__9_0.distcp", 0, len(buffer.getvalue()))
    index.storage_data[MetadataIndex(name)] = place
    file.write_bytes(pickle.dumps(index))


def hostile_torch_file(file: Path, marker: Path) -> None:
    torch.save({"cpu": Payload(marker), "optimizer": Payload(marker)}, file)
