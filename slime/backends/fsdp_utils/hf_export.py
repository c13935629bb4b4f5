"""Export the trainer's parameters under Hugging Face names: as buckets for engines, or as files.

Full parameters are all-gathered from the shards of all ranks, several per collective: a model has
hundreds of small parameters, and every collective has a fixed latency.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.loading import ShardedModel, shard_of
from slime.backends.fsdp_utils.lora import first_row, is_adapter
from slime.backends.fsdp_utils.lora_experts import adapter_module, adapter_path
from slime.backends.kernels.fused_ops import SCALE, unpacked
from slime.config.checks.model_types import in_tower
from slime.config.lora import LoraConfig
from slime.config.peft_files import GATE_UP, LORA_A, LORA_B, is_experts
from slime.runlog.export_folder import ExportInfo
from slime.utils.device import current_device
from slime.weights.buckets import (
    CastBucket,
    HFTensors,
    NamedCast,
    NamedTensor,
    batches,
    hf_views,
    merge_adapter,
    weight_dtype,
)
from slime.weights.fp8 import dequantized
from slime.weights.fp8_format import format_of
from slime.weights.hf_folder import FILE_BYTES, write_hf_folder
from slime.weights.peft_folder import to_peft

_AT_ONCE = 64  # parameters per batch, so that the first bucket does not wait for all of them


def hf_buckets(
    model: ShardedModel,
    dtype: torch.dtype,
    max_bytes: int,
    *,
    keep: bool,
    merged: bool = True,
    tower: bool = True,
) -> Iterator[CastBucket]:
    """Yield buckets of (checkpoint name, full tensor), each up to `max_bytes` or one larger tensor.

    Tied weights occur once. Gathering is collective: all ranks must iterate together. A tensor may
    share memory with its parameter: read it before the next training step. With `keep=False` a rank
    yields the same number of buckets, but empty: it takes part in gathering and stores nothing.
    Adapters are merged into the weights, or omitted with `merged=False`; `tower=False` omits a vision
    tower.
    """
    lora = model.lora if merged else None
    as_is = model.is_whole and lora is None and model.fp8 is None
    weights = _wanted(model, dtype, tower=tower)
    weights = weights if lora is None else _merged(model, weights, lora)
    tensors = _own_tensors(model, weights) if as_is else _gathered_tensors(model, weights)
    yield from map(CastBucket, batches(tensors, _sent_bytes, max_bytes, keep=keep))


def _sent_bytes(named: NamedCast) -> int:
    _, tensor, wanted = named
    return tensor.numel() * wanted.itemsize


def _own_tensors(model: ShardedModel, weights: Iterator[NamedCast]) -> Iterator[NamedCast]:
    """Yield uncast tensors of an unsharded model: a bucket is cast as a whole later."""
    while some := list(islice(weights, _AT_ONCE)):
        parts = local_parts(param for _, param, _ in some)
        for (name, _, wanted), part in zip(some, parts, strict=True):
            for hf_name, view in _hf_views(model, [(name, part)]):
                yield hf_name, view, wanted


def _gathered_tensors(model: ShardedModel, weights: Iterator[NamedCast]) -> Iterator[NamedCast]:
    for name, tensor in _hf_views(model, whole_tensors(weights)):
        yield name, tensor.contiguous(), tensor.dtype  # some families store experts transposed


def _hf_views(model: ShardedModel, named: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    model_type = model.module.hf.config.model_type
    return hf_views(named, model_type=model_type, stored=model.stored)


def _wanted(model: ShardedModel, dtype: torch.dtype, *, tower: bool) -> Iterator[NamedCast]:
    hf = model.module.hf
    for name, param in model.tensors().items():
        if not tower and in_tower(name):
            continue
        if name + SCALE in model.scales:
            param = _dequantized(model, name)
        floating = param.is_floating_point()
        yield name, param, weight_dtype(hf, name, dtype) if floating else param.dtype


@torch.no_grad()
def _dequantized(model: ShardedModel, name: str) -> DTensor:
    """Dequantize a parameter that is held in FP8 to the compute dtype."""
    param, scale, layout = model.params[name], model.scales[name + SCALE], model.fp8
    assert layout is not None, "there are scales"
    local, start = param.to_local().to(scale.device), first_row(param)
    if param.ndim == 2:  # a shard may begin inside of a block
        scale = scale.repeat_interleave(layout.block[0], dim=0)
        layout = replace(layout, block=(1, layout.block[1]))
    scale = scale[start : start + local.shape[0]]
    return shard_of(param, unpacked(local, scale, layout, halves=name.endswith(GATE_UP)))


def _merged(
    model: ShardedModel, weights: Iterator[NamedCast], lora: LoraConfig
) -> Iterator[NamedCast]:
    """Yield parameters with this rank's rows, or experts, of the adapters merged in.

    Matrices that are not sharded like the weight are gathered: A of a linear layer, or one that
    experts share.
    """
    small = ((n, p, torch.float32) for n, p in model.params.items() if _whole_for_merging(n, p))
    whole = dict(whole_tensors(small))
    for name, param, wanted in weights:
        path = adapter_path(name.removesuffix(".weight"))
        if path + LORA_A not in model.params:
            yield name, param, wanted
            continue
        assert isinstance(param, DTensor)
        weight, a, b = local_parts(
            [param, *(whole.get(n, model.params[n]) for n in (path + LORA_A, path + LORA_B))]
        )
        yield name, shard_of(param, merge_adapter(weight, a, b, lora.scaling, wanted)), wanted


def _whole_for_merging(name: str, param: DTensor) -> bool:
    if name.endswith(LORA_B):
        return param.ndim == 2 and is_experts(adapter_module(name.removesuffix(LORA_B)))
    return name.endswith(LORA_A) and param.ndim == 2


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
    buckets: Iterable[HFTensors] = hf_buckets(model, dtype, FILE_BYTES, keep=writes)
    if writes:
        buckets = chain(buckets, _unmodeled_tensors(model.module.hf, source, dtype))
    write_hf_folder(path, source, dtype, buckets, writes=writes, info=info)
    dist.barrier()


def _unmodeled_tensors(
    hf: PreTrainedModel, source: str, dtype: torch.dtype
) -> Iterator[list[NamedTensor]]:
    """Yield the tensors of `source` that transformers leaves out of the model, file by file.

    The model class lists their names: MTP layers, and the vision tower beside a text model. Those in
    FP8 are dequantized, since an export declares no quantization.
    """
    patterns = list(hf._keys_to_ignore_on_load_unexpected or ())
    tied = set(hf._tied_weights_keys or ())
    fp8 = format_of(json.loads((Path(source) / "config.json").read_text()))
    for path in sorted(Path(source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [
                name
                for name in file.keys()  # noqa: SIM118
                if name not in tied and any(re.search(pattern, name) for pattern in patterns)
            ]
            held = [(name, file.get_tensor(name)) for name in names]
        if fp8 is not None and held:
            held = list(dequantized(held, Path(source), fp8, dtype))
        if held:
            yield held


def whole_adapters(model: ShardedModel, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Yield full adapters by their names in PEFT's files; all ranks must iterate together."""
    wanted = ((n, p, dtype) for n, p in model.params.items() if is_adapter(n))
    yield from to_peft((adapter_module(name), tensor) for name, tensor in whole_tensors(wanted))


def own_adapters(model: ShardedModel) -> Iterator[NamedTensor]:
    """Yield the adapters of an unsharded model as it trains them, by their names in PEFT's files."""
    names, with_experts = _adapter_names(tuple(model.params))
    # Not to_local(), which costs more per parameter than all the rest of an update.
    held = ((name, model.params[name]._local_tensor) for name in names)
    yield from to_peft((adapter_module(n), t) for n, t in held) if with_experts else held


@lru_cache(maxsize=4)
def _adapter_names(names: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the adapters in order, and whether some are of experts, whose names differ in PEFT's files."""
    found = sorted(name for name in names if is_adapter(name))
    return found, any(adapter_module(name) != name for name in found)


GATHER_BYTES = 64 << 20  # limit of full tensors per collective; a larger tensor has its own


def whole_tensors(
    wanted: Iterable[NamedCast], max_bytes: int = GATHER_BYTES
) -> Iterator[NamedTensor]:
    """Yield each parameter as a full tensor, in order; all ranks must iterate together.

    A tensor may share memory with its parameter, or with the tensors yielded before and after it.
    """
    batch: list[NamedCast] = []
    size = 0
    for name, param, dtype in wanted:
        nbytes = param.numel() * dtype.itemsize
        if batch and (size + nbytes > max_bytes or dtype != batch[0][2]):
            yield from _gathered(batch)
            batch, size = [], 0
        batch.append((name, param, dtype))
        size += nbytes
    yield from _gathered(batch)


@torch.no_grad()  # with grad each to_local() goes through DTensor's slow dispatcher
def local_parts(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in params]


def _gathered(batch: list[NamedCast]) -> Iterator[NamedTensor]:
    sharded = [wanted[1] for wanted in batch if isinstance(wanted[1], DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        parts = local_parts(param for _, param, _ in batch)
        local = [(name, part, dtype) for (name, _, dtype), part in zip(batch, parts, strict=True)]
        yield from CastBucket(local)
        return
    flat = torch.cat([_padded_part(p, batch[0][2]) for p in sharded])
    world = sharded[0].device_mesh.size()
    everyone = flat.new_empty(world, flat.numel())
    dist.all_gather(list(everyone), flat, group=sharded[0].device_mesh.get_group())
    start = 0
    for name, param, dtype in batch:
        if not isinstance(param, DTensor):
            yield from CastBucket([(name, param.detach(), dtype)])
            continue
        end = start + _part_numel(param)
        parts = everyone[:, start:end].reshape(-1, *param.shape[1:])
        yield name, parts[: param.shape[0]]
        start = end


def _padded_part(param: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the flat shard padded to rank 0's size: the last ranks' may be shorter or empty."""
    assert param.placements == (Shard(0),), param.placements
    local = local_parts([param])[0].to(current_device(), dtype).reshape(-1)
    return torch.nn.functional.pad(local, (0, _part_numel(param) - local.numel()))


def _part_numel(param: DTensor) -> int:
    rows = math.ceil(param.shape[0] / param.device_mesh.size())
    return rows * math.prod(param.shape[1:])
