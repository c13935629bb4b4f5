"""A folder of weights that `from_pretrained` and every engine can load, written bucket by bucket."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.backends.weight_sync.disk import copy_model_files

FILE_BYTES = 4 << 30

Bucket = list[tuple[str, torch.Tensor]]


def write_hf_folder(
    path: str, source: str, dtype: torch.dtype, buckets: Iterable[Bucket], *, writes: bool
) -> None:
    """One file per bucket; config, tokenizer and the like are copied from `source`.

    Every rank calls it, as gathering the buckets takes all of them; one writes.
    """
    folder = Path(path)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        copy_model_files(Path(source), folder)
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets):
        if writes:
            file = f"model-{number + 1:05d}.safetensors"
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket}
            save_file(_unshared(tensors), folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file))
            total += sum(tensor.nbytes for tensor in tensors.values())
    if writes:
        _write_index(folder, weight_map, total, dtype)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of one fused parameter share memory, which safetensors refuses to write."""
    return {
        name: tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        for name, tensor in tensors.items()
    }


def _write_index(folder: Path, weight_map: dict[str, str], total: int, dtype: torch.dtype) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
