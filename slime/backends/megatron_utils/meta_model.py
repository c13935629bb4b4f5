"""Build one rank of a Megatron run without memory: real model, gradient buffers and optimizer.

Tensors are on the meta device and torch's fake process group replaces the other ranks, so a process
on a laptop can be rank 37 of 64. It needs a process of its own: `slime/backends/model_size.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cpu import Function, InterceptTorch, install_cpu_adapter
from slime.backends.model_size import RankModel
from slime.backends.optim import lr_schedule
from slime.config.checks.megatron_support import NEEDS_TE
from slime.utils.device import use_device

install_cpu_adapter()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402

from slime.backends.megatron_utils.hf_weights.families import weight_map  # noqa: E402
from slime.backends.megatron_utils.lora import add_adapters  # noqa: E402
from slime.backends.megatron_utils.model import build_chunks, freeze, wrap_chunks  # noqa: E402
from slime.backends.megatron_utils.model_config import (  # noqa: E402
    model_config,
    read_config,
    virtual_stages,
)
from slime.backends.megatron_utils.optimizer import (  # noqa: E402
    ScheduledOptimizer,
    grad_buffers,
)
from slime.backends.megatron_utils.parallel import all_layers, init_parallel  # noqa: E402
from slime.backends.megatron_utils.passes import prepare_config  # noqa: E402

if TYPE_CHECKING:
    from slime.config.arguments import Args

_META = torch.device("meta")
# These need packages or a GPU. FP8 and FP4 are counted as bf16; the others do not change memory.
_WITHOUT = {
    "moe_enable_deepep": False,
    "moe_grouped_gemm": False,
    "gradient_accumulation_fusion": False,
    **dict.fromkeys(NEEDS_TE),
}


def count_rank(args: Args, rank: int, world_size: int, *, critic: bool = False) -> RankModel:
    aware = args.use_precision_aware_optimizer and args.optimizer_cpu_offload  # else TE's FusedAdam
    args = args.replace(
        **_WITHOUT,
        moe_token_dispatcher_type="alltoall",
        use_precision_aware_optimizer=aware,
        attention_backend="auto",
        enable_mtp_training=args.enable_mtp_training and not critic,
    )
    hf_config = read_config(args.hf_checkpoint)
    with _as_rank(rank, world_size), InterceptTorch(_with_short_types), use_device(_META):
        init_parallel(args, virtual_stages(args, hf_config.num_hidden_layers))
        config = model_config(hf_config, args)
        config.transformer_impl, config.moe_grouped_gemm = "local", False
        prepare_config(config)
        chunks = build_chunks(args, config, hf_config, critic=critic)
        weights = weight_map(hf_config, args)
        if not critic:
            freeze(args, chunks, weights)
        add_adapters(args, chunks, weights)
        wrapped = wrap_chunks(args, config, chunks)
        optimizer = ScheduledOptimizer(args, wrapped, lr_schedule(args))
        return _count(rank, chunks, wrapped, list(optimizer.moments()))


def _count(
    rank: int,
    chunks: Sequence[Any],
    wrapped: Sequence[Any],
    moments: list[tuple[torch.Tensor, int]],
) -> RankModel:
    params = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for chunk in chunks for b in chunk.buffers()]
    layers = [layer for chunk in chunks for layer in all_layers(chunk)]
    sparse = sum(isinstance(layer.mlp, MoELayer) for layer in layers)
    own = {tensor.untyped_storage()._cdata for tensor in params}
    copies = [shard for shard, _ in moments if shard.untyped_storage()._cdata not in own]
    return RankModel(
        rank=rank,
        parameters=sum(p.numel() for p in params),
        expert_parameters=sum(p.numel() for p in params if not getattr(p, "allreduce", True)),
        trained_parameters=sum(p.numel() for p in params if p.requires_grad),
        weight_sizes=dict(Counter(t.nbytes for t in [*params, *buffers])),
        weight_storages=_storages([*params, *buffers]),
        gradient_storages=[grads.nbytes for grads in grad_buffers(wrapped)],
        master_sizes=dict(Counter(shard.numel() for shard in copies)),
        moment_sizes=dict(Counter(shard.numel() for shard, count in moments if count == 2)),
        momentum_sizes=dict(Counter(shard.numel() for shard, count in moments if count == 1)),
        dense_layers=len(layers) - sparse,
        moe_layers=sparse,
        has_embedding=any(chunk.pre_process for chunk in chunks),
        has_head=any(chunk.post_process for chunk in chunks),
    )


def _storages(tensors: Iterable[torch.Tensor]) -> list[int]:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return list(storages.values())


@contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: _META  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _with_short_types(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Remove "meta." from type names, which optimizers compare with torch.cuda.FloatTensor."""
    result = func(*args, **kwargs)
    if func is torch.Tensor.type and isinstance(result, str):
        return result.replace("meta.", "")
    return result
