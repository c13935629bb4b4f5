"""Build one rank of an FSDP run on the meta device, sharded over a fake process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slime.backends.fsdp_utils.expert_parallel import make_expert_groups
from slime.backends.fsdp_utils.loading import build_model
from slime.backends.fsdp_utils.optimizer import muon_names
from slime.backends.kernels.fused_ops import SCALE
from slime.backends.model_size import RankModel
from slime.backends.param_names import Freezing, without_frozen_tower
from slime.utils.device import use_device

if TYPE_CHECKING:
    from slime.config.arguments import Args


def count_rank(args: Args, rank: int, world_size: int) -> RankModel:
    """Count the rank's shards and optimizer state; gradients exist only during a step."""
    with _as_rank(rank, world_size), use_device(torch.device("meta")):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
        experts = make_expert_groups(args.expert_model_parallel_size or 1, world_size)
        model = build_model(args, mesh, trainable=True, experts=experts)
        local = {name: param.to_local() for name, param in model.params.items()}
        buffers = list(model.module.hf.buffers())
        matrices = muon_names(model.module.hf, model.params)
        in_fp8 = {name: t.nbytes for name, t in local.items() if name + SCALE in model.scales}
        elements = {name: in_fp8.get(name, t.numel()) for name, t in local.items()}
    names = without_frozen_tower(args, list(local if model.lora is None else model.own))
    trained = set(Freezing.of(args).trained(names))
    once = _with_one_moment(args, trained, matrices)
    stateless = args.optimizer == "sgd" and not args.sgd_momentum
    twice = set() if stateless else trained - once
    config: Any = model.module.hf.config.get_text_config()
    layers = config.num_hidden_layers
    return RankModel(
        rank=rank,
        parameters=sum(elements.values()),
        expert_parameters=sum(count for n, count in elements.items() if ".experts." in n),
        trained_parameters=sum(t.numel() for n, t in local.items() if n in trained),
        weight_sizes=dict(Counter(t.nbytes for t in local.values())),
        weight_storages=[sum(t.nbytes for t in [*local.values(), *buffers])],
        gradient_storages=[],
        master_sizes={},
        moment_sizes=dict(Counter(t.numel() for n, t in local.items() if n in twice)),
        momentum_sizes=dict(Counter(t.numel() for n, t in local.items() if n in once)),
        dense_layers=0 if _num_experts(config) else layers,
        moe_layers=layers if _num_experts(config) else 0,
        has_embedding=True,
        has_head=True,
        fp8_parameters=sum(in_fp8.values()),
    )


def _with_one_moment(args: Args, trained: set[str], matrices: set[str]) -> set[str]:
    if args.optimizer == "sgd":
        return trained if args.sgd_momentum else set()
    return trained & matrices if args.optimizer == "muon" else set()


def _num_experts(config: object) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((getattr(config, n) for n in names if getattr(config, n, None)), 0)


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
