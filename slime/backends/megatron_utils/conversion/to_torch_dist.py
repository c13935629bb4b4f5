"""Convert Hugging Face to torch_dist; every rank reads and writes only its shard of the model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.config.arguments import Args
from slime.runlog.checkpoint_folder import CheckpointFolder, CheckpointMeta
from slime.weights.buckets import stored_names

install_cpu_adapter()

from slime.backends.megatron_utils.checkpoint import Checkpointer  # noqa: E402
from slime.backends.megatron_utils.conversion.setup import (  # noqa: E402
    conversion_args,
    has_layout,
    layout_text,
    model_sizes,
    process_group,
    progress,
    stages,
    with_layout,
)
from slime.backends.megatron_utils.hf_weights.families import (  # noqa: E402
    padded_weight_map,
    weight_map,
)
from slime.backends.megatron_utils.hf_weights.local_weights import load_hf  # noqa: E402
from slime.backends.megatron_utils.hf_weights.reader import HfReader  # noqa: E402
from slime.backends.megatron_utils.model import build_chunks  # noqa: E402
from slime.backends.megatron_utils.model_config import (  # noqa: E402
    model_config,
    read_config,
    virtual_stages,
)
from slime.backends.megatron_utils.parallel import init_parallel  # noqa: E402


def main(argv: list[str]) -> int:
    """Run `[MODEL_ARGS] --hf-checkpoint FOLDER --save FOLDER` in one process or under torchrun."""
    args = conversion_args(argv)
    config = read_config(args.hf_checkpoint)
    reader = HfReader(args.hf_checkpoint)
    with process_group():
        args = with_sharding(args, config, reader)
        chunks = build(args, config)
        load(chunks, args, config, reader)
        folder = save(chunks, args, config)
        if dist.get_rank() == 0:
            print(f"{folder}: {config.model_type} of {args.hf_checkpoint} on {_ranks()}")
    return 0


def with_sharding(args: Args, config: PretrainedConfig, reader: HfReader) -> Args:
    """Set the user's parallel sizes or a pipeline over all ranks, and the checkpoint's dtype."""
    layout = None
    if not has_layout(args):
        stored = stored_names(args.hf_checkpoint, config.model_type)
        weights = padded_weight_map(config, config.vocab_size, stored=stored)
        sizes = model_sizes(weights, reader)
        layout = layout_text(stages(sizes, dist.get_world_size()))
    half = config.dtype in (torch.bfloat16, torch.float16)
    return with_layout(args, "bf16" if half else "fp32", layout, dist.get_world_size())


def build(args: Args, config: PretrainedConfig) -> list[torch.nn.Module]:
    """Return this rank's model chunks with uninitialized weights."""
    init_parallel(args, virtual_stages(args, config.num_hidden_layers))
    megatron = model_config(config, args)
    megatron.perform_initialization = False  # every weight comes from the files
    return list(build_chunks(args, megatron, config))


def load(
    chunks: list[torch.nn.Module], args: Args, config: PretrainedConfig, reader: HfReader
) -> None:
    total = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    with progress("reading", total, shown=dist.get_rank() == 0) as advance:
        load_hf(
            chunks,
            weight_map(config, args),
            reader,
            on_tensor=lambda weight: advance(weight.tensor.nbytes),
        )


def save(chunks: list[torch.nn.Module], args: Args, config: PretrainedConfig) -> Path:
    """Save the checkpoint with all ranks together; return its folder."""
    assert args.save is not None, "conversion_args requires it"
    folder = CheckpointFolder(args.save)
    first = dist.get_rank() == 0
    if first:
        print(f"writing {folder.path(0)}", flush=True)
    temporary = [str(folder.begin(0)) if first else ""]
    dist.broadcast_object_list(temporary)
    Checkpointer(config.model_type).save(temporary[0], 0, chunks, consume=True)
    dist.barrier()
    if first:
        meta = CheckpointMeta(
            rollout_id=0, weight_version=0, train_backend="megatron", release=True
        )
        folder.commit(meta)
    dist.barrier()
    return folder.path(0)


def _ranks() -> str:
    count = dist.get_world_size()
    return "one process" if count == 1 else f"{count} processes"
