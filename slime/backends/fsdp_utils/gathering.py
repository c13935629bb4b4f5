"""Whole parameters from the parts that ranks hold: several in one collective, each as large as need be.

A model has hundreds of small parameters, and a collective has a price however little it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from slime.utils.device import current_device
from slime.weights.ipc import aligned

GATHER_BYTES = 64 << 20  # of whole tensors in one collective, or one larger tensor

Room = Callable[[int], torch.Tensor | None]  # so many bytes of somebody's memory, if there are
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


def cast_all(wanted: Sequence[Wanted], room: Room | None = None) -> list[Named]:
    """Each in the type it is wanted in, on the device that gathers: parameters may be offloaded.

    All are cast together, which costs less than one by one, into one piece of memory: where `room` says,
    if it has any. If none has to be, they are given as they are.
    """
    device = current_device()
    if all(tensor.dtype == dtype and tensor.device == device for _, tensor, dtype in wanted):
        return [(name, tensor) for name, tensor, _ in wanted]
    places = _places(wanted, device, room)
    kinds = [(tensor.dtype, dtype) for _, tensor, dtype in wanted]
    for kind in set(kinds):  # only what is cast alike can be cast together
        chosen = [place for place, other in enumerate(kinds) if other == kind]
        sources = [wanted[place][1] for place in chosen]
        torch._foreach_copy_([places[place] for place in chosen], sources)
    return [(name, place) for (name, _, _), place in zip(wanted, places, strict=True)]


@torch.no_grad()  # with gradients each of them would pass DTensor's dispatcher
def local_parts(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in params]


def _gathered(batch: list[Wanted]) -> Iterator[Named]:
    sharded = [wanted[1] for wanted in batch if isinstance(wanted[1], DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        parts = local_parts(param for _, param, _ in batch)
        local = [(name, part, dtype) for (name, _, dtype), part in zip(batch, parts, strict=True)]
        yield from cast_all(local)
        return
    flat = torch.cat([_padded_part(p, batch[0][2]) for p in sharded])
    world = sharded[0].device_mesh.size()
    everyone = flat.new_empty(world, flat.numel())
    dist.all_gather(list(everyone), flat, group=sharded[0].device_mesh.get_group())
    start = 0
    for name, param, dtype in batch:
        if not isinstance(param, DTensor):
            yield from cast_all([(name, param.detach(), dtype)])
            continue
        end = start + _part_numel(param)
        parts = everyone[:, start:end].reshape(-1, *param.shape[1:])
        yield name, parts[: param.shape[0]]
        start = end


def _places(
    wanted: Sequence[Wanted], device: torch.device, room: Room | None
) -> list[torch.Tensor]:
    """Cut from one piece of memory all at once: by one a tensor costs more than its part of the copy."""
    sizes = [aligned(tensor.numel() * dtype.itemsize) for _, tensor, dtype in wanted]
    memory = room(sum(sizes)) if room is not None else None
    if memory is None:
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    memory = memory[: sum(sizes)]
    cuts = {
        kind: memory.view(kind).split([size // kind.itemsize for size in sizes])
        for kind in {dtype for _, _, dtype in wanted}
    }
    places = []
    for index, (_, tensor, dtype) in enumerate(wanted):
        place = cuts[dtype][index]
        if place.numel() > tensor.numel():
            place = place[: tensor.numel()]
        places.append(place.view_as(tensor))
    return places


def _padded_part(param: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """Flat, and as long as the first rank's: the last ranks' parts may be shorter, or empty."""
    assert param.placements == (Shard(0),), param.placements
    local = local_parts([param])[0].to(current_device(), dtype).reshape(-1)
    return torch.nn.functional.pad(local, (0, _part_numel(param) - local.numel()))


def _part_numel(param: DTensor) -> int:
    rows = math.ceil(param.shape[0] / param.device_mesh.size())
    return rows * math.prod(param.shape[1:])
