"""Export the trainer's parameters under Hugging Face names: as buckets for engines, or as files."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.gathering import local_parts, whole_tensors
from slime.backends.fsdp_utils.loading import ShardedModel
from slime.backends.hf_folder import FILE_BYTES, write_hf_folder
from slime.runlog.export_folder import ExportInfo
from slime.weights.buckets import CastBucket, NamedCast
from slime.weights.hf_views import hf_views, weight_dtype

_AT_ONCE = 64  # parameters per batch, so that the first bucket does not wait for all of them


def hf_buckets(
    model: ShardedModel,
    dtype: torch.dtype,
    max_bytes: int,
    *,
    keep: bool,
) -> Iterator[CastBucket]:
    """Yield buckets of (checkpoint name, full tensor), each up to `max_bytes` or one larger tensor.

    Tied weights occur once. Gathering is collective: all ranks must iterate together. A tensor may
    share memory with its parameter: read it before the next training step. With `keep=False` a rank
    yields the same number of buckets, but empty: it takes part in gathering and stores nothing.
    """
    tensors = _own_tensors(model, dtype) if model.is_whole else _gathered_tensors(model, dtype)
    bucket: list[NamedCast] = []
    size = 0
    for name, tensor, wanted in tensors:
        nbytes = tensor.numel() * wanted.itemsize
        if size and size + nbytes > max_bytes:
            yield CastBucket(bucket)
            bucket, size = [], 0
        size += nbytes
        if keep:
            bucket.append((name, tensor, wanted))
    if size:
        yield CastBucket(bucket)


def _own_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[NamedCast]:
    """Yield uncast tensors of an unsharded model: a bucket is cast as a whole later."""
    model_type = model.module.hf.config.model_type
    weights = _wanted(model, dtype)
    while some := list(islice(weights, _AT_ONCE)):
        parts = local_parts(param for _, param, _ in some)
        for (name, _, wanted), part in zip(some, parts, strict=True):
            for hf_name, view in hf_views([(name, part)], model_type=model_type):
                yield hf_name, view, wanted


def _gathered_tensors(model: ShardedModel, dtype: torch.dtype) -> Iterator[NamedCast]:
    whole = whole_tensors(_wanted(model, dtype))
    for name, tensor in hf_views(whole, model_type=model.module.hf.config.model_type):
        yield name, tensor, tensor.dtype


def _wanted(model: ShardedModel, dtype: torch.dtype) -> Iterator[NamedCast]:
    hf = model.module.hf
    for name, param in model.tensors().items():
        floating = param.is_floating_point()
        yield name, param, weight_dtype(hf, name, dtype) if floating else param.dtype


def export_hf(
    model: ShardedModel,
    path: str,
    source: str,
    dtype: torch.dtype,
    info: ExportInfo | None = None,
) -> None:
    """Write a Hugging Face folder that `from_pretrained` and every engine can load, on rank 0.

    Config, tokenizer etc. are copied from `source`; weights are gathered and written file by file.
    """
    writes = dist.get_rank() == 0
    buckets = hf_buckets(model, dtype, FILE_BYTES, keep=writes)
    write_hf_folder(path, source, dtype, buckets, writes=writes, info=info)
    dist.barrier()
