"""The trainer's parameters under Hugging Face names: in buckets for engines, as files for everyone else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.gathering import whole_tensors
from slime.backends.fsdp_utils.loading import ShardedModel
from slime.backends.hf_folder import FILE_BYTES, Bucket, write_hf_folder
from slime.utils.hf_views import hf_views, weight_dtype


def hf_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, whole tensor) of every weight, a tied one once.

    All ranks gather them together. A tensor may share memory with the parameter: it is to be read
    before the next training step.
    """
    hf = model.module.hf
    wanted = (
        (name, param, weight_dtype(hf, name, dtype) if param.is_floating_point() else param.dtype)
        for name, param in model.tensors().items()
    )
    yield from hf_views(whole_tensors(wanted), model_type=hf.config.model_type)


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
