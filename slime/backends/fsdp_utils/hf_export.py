"""The trainer's parameters under Hugging Face names: in buckets for engines, as files for everyone else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.loading import ShardedModel, persistent_buffers, shard_of
from slime.backends.weight_sync.disk import copy_model_files
from slime.utils.device import current_device
from slime.utils.hf_views import hf_views, weight_dtype

_FILE_BYTES = 4 << 30

Bucket = list[tuple[str, torch.Tensor]]


def hf_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, whole tensor) of every weight, a tied one once.

    One parameter at a time is gathered, by all ranks together. A tensor may share memory with the
    parameter: it is to be read before the next training step.
    """
    hf = model.module.hf
    for name, param in {**model.params, **persistent_buffers(hf)}.items():
        tensor = _whole(param, weight_dtype(hf, name, dtype))
        yield from hf_views([(name, tensor)], model_type=hf.config.model_type)


def hf_buckets(
    model: ShardedModel, dtype: torch.dtype, max_bytes: int, *, keep: bool
) -> Iterator[Bucket]:
    """The same in lists of at most `max_bytes`, or of one larger tensor.

    With `keep` off the lists are empty but as many: a rank that only helps to gather holds nothing.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in hf_tensors(model, dtype):
        if size and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        size += tensor.nbytes
        if keep:
            bucket.append((name, tensor))
    if size:
        yield bucket


def export_hf(model: ShardedModel, path: str, source: str, dtype: torch.dtype) -> None:
    """Write a folder that `from_pretrained` and every engine can load; rank 0 writes it.

    Config, tokenizer and the like are copied from `source`, the weights go out file by file.
    """
    folder = Path(path)
    writes = dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        copy_model_files(Path(source), folder)
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(hf_buckets(model, dtype, _FILE_BYTES, keep=writes)):
        if writes:
            file = f"model-{number + 1:05d}.safetensors"
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket}
            save_file(_unshared(tensors), folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file))
            total += sum(tensor.nbytes for tensor in tensors.values())
    if writes:
        _write_index(folder, weight_map, total, model, dtype)
    dist.barrier()


def _whole(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast before it is gathered, and on the device that gathers: parameters may be offloaded."""
    local = param.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    local = local.to(current_device(), dtype if local.is_floating_point() else local.dtype)
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return local
    return shard_of(param, local).full_tensor()


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of one fused parameter share memory, which safetensors refuses to write."""
    return {
        name: tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        for name, tensor in tensors.items()
    }


def _write_index(
    folder: Path, weight_map: dict[str, str], total: int, model: ShardedModel, dtype: torch.dtype
) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
