"""Write weights as a folder that `from_pretrained` and every engine can load, bucket by bucket.

`write_hf_folder` exports a checkpoint; `DiskTransport` sends an update through a shared folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.runlog.export_folder import MARKER, ExportInfo, new_export
from slime.utils.concurrency import call_all
from slime.weights.buckets import Bucket, HFTensors
from slime.weights.engine_client import EngineClient
from slime.weights.transport import WeightTransport

FILE_BYTES = 4 << 30  # limit of a bucket of an export, which becomes one file
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def write_hf_folder(
    path: str,
    source: str,
    dtype: torch.dtype,
    buckets: Iterable[HFTensors],
    *,
    writes: bool,
    info: ExportInfo | None = None,
) -> None:
    """Write one safetensors file per bucket; copy config, tokenizer etc. from `source`.

    All ranks must call it, since gathering buckets is collective; the rank with `writes` writes.
    The complete folder is renamed to `path`. The weights are unquantized, whatever `source` holds.
    """
    if not writes:
        for _ in buckets:
            pass
        return
    with new_hf_folder(path, source, dtype, info=info, quantized=False) as files:
        for bucket in buckets:
            files.add(bucket)


@contextmanager
def new_hf_folder(
    path: str,
    source: str,
    dtype: torch.dtype,
    *,
    info: ExportInfo | None = None,
    quantized: bool,
) -> Iterator[WeightFiles]:
    """Yield the files of a new folder; rename it to `path` when the block ends without an error.

    With `quantized` the weights are in the format of `source`; otherwise its declaration is removed.
    """
    with new_export(path, info) as folder:
        files = WeightFiles(folder, Path(source))
        yield files
        files.write_index()
        _correct_config(folder / "config.json", dtype, quantized=quantized)


class DiskTransport(WeightTransport):
    """Writes `<folder>/weights_0000007`, makes the engines load it, then removes older versions.

    The folder is renamed to its final name when it is complete, so any folder of that name can be
    loaded.
    """

    shares_device = False

    def __init__(
        self, folder: str | Path, hf_checkpoint: str | Path, *, keep_files: bool = False
    ) -> None:
        self._keep_files = keep_files  # keep older versions
        self._folder, self._hf_checkpoint = Path(folder), Path(hf_checkpoint)
        self._files: WeightFiles | None = None

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version = engines, version
        self._target = self._folder / f"weights_{version:07d}"
        partial = self._target.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
        partial.mkdir(parents=True)
        self._files = WeightFiles(partial, self._hf_checkpoint)

    def send(self, bucket: Bucket) -> None:
        assert self._files is not None
        self._files.add(bucket.tensors)

    def finish(self) -> None:
        assert self._files is not None
        self._files.write_index()
        shutil.rmtree(self._target, ignore_errors=True)
        os.replace(self._files.folder, self._target)
        nbytes, self._files = self._files.nbytes, None
        payload = {
            "model_path": str(self._target.resolve()),
            "weight_version": str(self._version),
            "flush_cache": False,
        }
        call_all(
            self._engines,
            lambda engine: engine.update("/update_weights_from_disk", payload, nbytes=nbytes),
        )
        for old in self._folder.glob("weights_*"):
            if old != self._target and not self._keep_files:
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        if self._files is not None:
            shutil.rmtree(self._files.folder, ignore_errors=True)
            self._files = None


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A safetensors file that was written."""

    name: str
    tensors: list[str]
    nbytes: int


def write_weight_file(folder: Path, number: int, named: HFTensors) -> WeightFile:
    """Write `model-00001.safetensors` for number 1."""
    name = f"model-{number:05d}.safetensors"
    tensors = {name: tensor.cpu().contiguous() for name, tensor in named}
    save_file(_unshared(tensors), folder / name, metadata={"format": "pt"})
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return WeightFile(name=name, tensors=list(tensors), nbytes=nbytes)


class WeightFiles:
    """The safetensors files of a model in `folder`, next to copies of the other files in `source`."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder, self.nbytes = folder, 0
        self._weight_map: dict[str, str] = {}
        self._count = 0
        for path in source.iterdir():  # configuration, tokenizer, chat template
            if path.is_file() and not path.name.endswith((*_WEIGHT_FILES, MARKER)):
                shutil.copy(path, folder / path.name)

    def add(self, named: HFTensors) -> None:
        self.add_written(write_weight_file(self.folder, self._count + 1, named))

    def add_written(self, file: WeightFile) -> None:
        """Add a file that `write_weight_file` wrote, in this process or another."""
        self._count += 1
        self._weight_map.update(dict.fromkeys(file.tensors, file.name))
        self.nbytes += file.nbytes

    def write_index(self) -> None:
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": self._weight_map}
        text = json.dumps(index, indent=2) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tensors that share memory, as views of a fused parameter do: safetensors refuses it."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def _correct_config(path: Path, dtype: torch.dtype, *, quantized: bool) -> None:
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if not quantized:
        config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
