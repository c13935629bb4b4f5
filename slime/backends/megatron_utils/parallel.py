"""Megatron's process groups for the parallel sizes given by flags, and the chunks on a rank."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from slime.backends.checkpoint_reader import load_object
from slime.backends.megatron_utils.patches import patch_megatron
from slime.core.errors import UserError
from slime.core.types import ParallelInfo
from slime.utils.device import device_type

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from slime.config.arguments import Args

SUPPORTED = "0.16.1"
_sizes: dict[str, int | None] | None = None  # of the current groups


def init_parallel(args: Args, virtual_stages: int | None) -> ParallelInfo:
    """Create all process groups inside the default one; destroy those of another layout."""
    global _sizes
    check_version()
    patch_megatron()
    sizes = {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_stages,
        "context_parallel_size": args.context_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "distributed_timeout_minutes": args.distributed_timeout_minutes,
    }
    if sizes != _sizes or not parallel_state.model_parallel_is_initialized():
        _drop_groups()
        parallel_state.initialize_model_parallel(
            **sizes, create_gloo_process_groups=device_type() == "cuda"
        )
        _sizes = sizes
    model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    return parallel_info()


def _drop_groups() -> None:
    """Destroy groups of another layout, which Megatron only forgets; on a CPU they are reused."""
    if not parallel_state.model_parallel_is_initialized():
        return
    groups = [group for group in parallel_state._global_process_group_list or [] if group]
    dist.barrier()  # no collective is in flight after it
    parallel_state.destroy_model_parallel()
    for group in groups if device_type() == "cuda" else ():
        dist.destroy_process_group(group)


def tensor_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_pipeline_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_context_parallel_group())


def data_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_data_parallel_group())


def expert_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_expert_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    return _group(parallel_state.get_expert_tensor_parallel_group())


def _group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "init_parallel creates the process groups"
    return group


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have the same shape, in rank order."""
    if group.size() == 1:
        return [tensor]
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """Return the model inside its data-parallel wrapper."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return cast("GPTModel", chunk)


def decoder_layers(chunk: GPTModel) -> list[TransformerLayer]:
    return list(cast("list[TransformerLayer]", chunk.decoder.layers))


def all_layers(chunk: GPTModel) -> list[TransformerLayer]:
    """Return the decoder layers and those inside the chunk's multi-token-prediction layers."""
    further = cast("list[Any]", chunk.mtp.layers if getattr(chunk, "mtp_process", False) else [])
    return decoder_layers(chunk) + [layer.transformer_layer for layer in further]


def parallel_info() -> ParallelInfo:
    state = parallel_state
    return ParallelInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        pp_size=state.get_pipeline_model_parallel_world_size(),
    )


def check_version() -> None:
    """Raise UserError for another megatron-core, such as a Megatron-LM checkout on PYTHONPATH."""
    found = megatron.core.__version__
    if found != SUPPORTED:
        raise UserError(
            f"megatron-core {found} at {megatron.core.__path__[0]} is in use, and slime needs "
            f"{SUPPORTED} (installed: {version('megatron-core')}): take that folder off PYTHONPATH, or "
            f"pip install megatron-core=={SUPPORTED}"
        )


def rng_state() -> dict[str, Any]:
    """Return the state of this rank's random generators, for a checkpoint."""
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "tracker": {k: v.clone() for k, v in rng_tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(file: Path) -> None:
    state = load_object(file, file)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    rng_tracker().set_states(state["tracker"])


def rng_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "init_parallel seeds it"
    return tracker
