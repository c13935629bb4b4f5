"""Weights through a folder that trainer and engines share, as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.runlog.export_folder import MARKER
from slime.utils.concurrency import call_all
from slime.weights.buckets import Bucket
from slime.weights.engine_client import EngineClient
from slime.weights.transport import WeightTransport

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class DiskTransport(WeightTransport):
    """Writes `<folder>/weights_0000007`, makes the engines load it, then removes older versions.

    The folder is renamed to its final name when it is complete, so any folder of that name can be loaded.
    """

    shares_device = False

    def __init__(self, folder: str | Path, hf_checkpoint: str | Path) -> None:
        self._folder, self._hf_checkpoint = Path(folder), Path(hf_checkpoint)
        self._partial: Path | None = None

    def open(self, engines: list[EngineClient], version: int) -> None:
        self._engines, self._version = engines, version
        self._weight_map: dict[str, str] = {}
        self._nbytes = 0
        self._target = self._folder / f"weights_{version:07d}"
        self._partial = self._target.with_suffix(".tmp")
        shutil.rmtree(self._partial, ignore_errors=True)  # left by a run that was killed
        self._partial.mkdir(parents=True)
        copy_model_files(self._hf_checkpoint, self._partial)

    def send(self, bucket: Bucket) -> None:
        assert self._partial is not None
        name = f"model-{bucket.index + 1:05d}.safetensors"
        tensors = {key: tensor.contiguous().cpu() for key, tensor in bucket.tensors}
        save_file(_unshared(tensors), self._partial / name, metadata={"format": "pt"})
        self._weight_map.update(dict.fromkeys(tensors, name))
        self._nbytes += bucket.nbytes

    def finish(self) -> None:
        assert self._partial is not None
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": self._weight_map}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        shutil.rmtree(self._target, ignore_errors=True)
        os.replace(self._partial, self._target)
        self._partial = None
        call_all(self._engines, self._load)
        for old in self._folder.glob("weights_*"):
            if old != self._target:
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def _load(self, engine: EngineClient) -> None:
        payload = {
            "model_path": str(self._target.resolve()),
            "weight_version": str(self._version),
            "flush_cache": False,
        }
        engine.update("/update_weights_from_disk", payload, nbytes=self._nbytes)


def copy_model_files(source: Path, target: Path) -> None:
    """Copy everything but the weights: configuration, tokenizer, chat template."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith((*_WEIGHT_FILES, MARKER)):
            shutil.copy(path, target / path.name)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tensors that share memory, which safetensors refuses: views of a fused parameter may."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result
