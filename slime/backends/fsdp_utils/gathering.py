"""All-gather full parameters from the shards of all ranks, several per collective.

A model has hundreds of small parameters, and every collective has a fixed latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from slime.utils.device import current_device
from slime.weights.buckets import CastBucket, NamedCast, NamedTensor

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
