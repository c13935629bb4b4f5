"""Parameters gathered many at a time are the ones that were cut: whatever their sizes, types, order."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slime.backends.fsdp_utils.hf_export import whole_tensors
from tests.rank_pool import run_fsdp_ranks

SHAPES = [(7,), (1,), (6, 5), (2, 3, 4), (1, 9), (64, 64), (5, 2)]
TYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]


def whole(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(SHAPES[index % len(SHAPES)], generator=generator)


def _gather(rank: int, world_size: int, limit: int) -> list[tuple[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (world_size,))
    wanted = []
    for index in range(20):
        tensor = whole(index)
        if index % 6:  # the others are buffers, whole on every rank
            tensor = distribute_tensor(tensor, mesh, [Shard(0)])
        wanted.append((f"p{index}", tensor, TYPES[index % len(TYPES)]))
    return [(name, tensor.clone()) for name, tensor in whole_tensors(iter(wanted), limit)]


@pytest.mark.parametrize(("world_size", "limit"), [(1, 500), (3, 0), (3, 500), (3, 1 << 20)])
def test_gathered_is_what_was_cut(world_size, limit):
    for said in run_fsdp_ranks(_gather, world_size, world_size, limit):
        assert [name for name, _ in said] == [f"p{index}" for index in range(20)]
        for index, (_, tensor) in enumerate(said):
            assert torch.equal(tensor, whole(index).to(TYPES[index % len(TYPES)]))
