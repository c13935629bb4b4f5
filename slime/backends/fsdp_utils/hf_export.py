"""The trainer's parameters under Hugging Face names: in buckets for engines, as files for everyone else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.loading import ShardedModel, persistent_buffers, shard_of
from slime.backends.hf_folder import FILE_BYTES, Bucket, write_hf_folder
from slime.utils.device import current_device
from slime.utils.hf_views import hf_views, weight_dtype


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
    writes = dist.get_rank() == 0
    buckets = hf_buckets(model, dtype, FILE_BYTES, keep=writes)
    write_hf_folder(path, source, dtype, buckets, writes=writes)
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
