"""Write a folder that `from_pretrained` and every engine can load, bucket by bucket."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.runlog.export_folder import ExportInfo, begin_export, commit_export, discard_export
from slime.weights.buckets import HFTensors
from slime.weights.disk_transport import copy_model_files

FILE_BYTES = 4 << 30


def write_hf_folder(
    path: str,
    source: str,
    dtype: torch.dtype,
    buckets: Iterable[HFTensors],
    *,
    writes: bool,
    info: ExportInfo | None = None,
    quantized: bool = True,
) -> None:
    """Write one safetensors file per bucket; copy config, tokenizer etc. from `source`.

    All ranks must call it, since gathering buckets is collective; the rank with `writes` writes.
    The complete folder is renamed to `path`. `quantized=False` removes `quantization_config`.
    """
    if not writes:
        for _ in buckets:
            pass
        return
    try:
        _write_files(begin_export(path), source, dtype, buckets, quantized=quantized)
        commit_export(path, info or ExportInfo())
    except BaseException:
        discard_export(path)
        raise


def _write_files(
    folder: Path, source: str, dtype: torch.dtype, buckets: Iterable[HFTensors], *, quantized: bool
) -> None:
    copy_model_files(Path(source), folder)
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets):
        file = f"model-{number + 1:05d}.safetensors"
        tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket}
        save_file(_unshared(tensors), folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    _correct_config(folder / "config.json", dtype, quantized=quantized)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone views of a fused parameter: safetensors refuses to write tensors that share memory."""
    return {
        name: tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        for name, tensor in tensors.items()
    }


def _correct_config(path: Path, dtype: torch.dtype, *, quantized: bool) -> None:
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if not quantized:
        config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
