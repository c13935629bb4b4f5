"""Whole parameters from the parts that ranks hold: several in one collective, each as large as need be.

A model has hundreds of small parameters, and a collective has a price however little it moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from slime.utils.device import current_device

GATHER_BYTES = 64 << 20  # of whole tensors in one collective, or one larger tensor
_ALIGNMENT = 64  # bytes

Wanted = tuple[str, torch.Tensor, torch.dtype]  # name, parameter, the type it is wanted in
Named = tuple[str, torch.Tensor]


def whole_tensors(wanted: Iterable[Wanted], max_bytes: int = GATHER_BYTES) -> Iterator[Named]:
    """Each as a whole tensor, in their order; all ranks go through this together.

    A tensor may share memory with its parameter, or with others given before and after it.
    """
    batch: list[Wanted] = []
    size = 0
    for name, param, dtype in wanted:
        nbytes = param.numel() * dtype.itemsize
        if batch and (size + nbytes > max_bytes or dtype != batch[0][2]):
            yield from _gathered(batch)
            batch, size = [], 0
        batch.append((name, param, dtype))
        size += nbytes
    yield from _gathered(batch)


def _gathered(batch: list[Wanted]) -> Iterator[Named]:
    if not batch:
        return
    sharded = [wanted[1] for wanted in batch if isinstance(wanted[1], DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        names = [wanted[0] for wanted in batch]
        yield from zip(names, _locals([wanted[1] for wanted in batch], batch[0][2]), strict=True)
        return
    flat = torch.cat([_padded_part(p, batch[0][2]) for p in sharded])
    world = sharded[0].device_mesh.size()
    everyone = flat.new_empty(world, flat.numel())
    dist.all_gather(list(everyone), flat, group=sharded[0].device_mesh.get_group())
    start = 0
    for name, param, dtype in batch:
        if not isinstance(param, DTensor):
            yield name, _local(param, dtype)
            continue
        end = start + _part_numel(param)
        parts = everyone[:, start:end].reshape(-1, *param.shape[1:])
        yield name, parts[: param.shape[0]]
        start = end


def _local(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _locals([param], dtype)[0]


@torch.no_grad()  # with gradients each of them would pass DTensor's dispatcher
def _locals(params: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's parts, cast, on the device that gathers: parameters may be offloaded.

    Cast in one operation, whatever their number: it costs less than one each.
    """
    parts = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in params]
    device = current_device()
    if all(part.dtype == dtype and part.device == device for part in parts):
        return parts
    places = _empty_like(parts, dtype, device)
    torch._foreach_copy_(places, parts)
    return places


def _empty_like(
    tensors: list[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Parts of one new tensor, at addresses from which a GPU reads several elements at once."""
    step = _ALIGNMENT // dtype.itemsize
    lengths = [-(-tensor.numel() // step) * step for tensor in tensors]
    parts = torch.empty(sum(lengths), dtype=dtype, device=device).split(lengths)
    return [part[: t.numel()].view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _padded_part(param: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """Flat, and as long as the first rank's: the last ranks' parts may be shorter, or empty."""
    assert param.placements == (Shard(0),), param.placements
    local = _local(param, dtype).reshape(-1)
    return torch.nn.functional.pad(local, (0, _part_numel(param) - local.numel()))


def _part_numel(param: DTensor) -> int:
    rows = math.ceil(param.shape[0] / param.device_mesh.size())
    return rows * math.prod(param.shape[1:])
