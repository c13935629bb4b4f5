"""Save scales and amax histories of FP8 delayed scaling as plain tensors of a checkpoint.

TransformerEngine pickles them into `_extra_state`, and from 2.20 on refuses to load that. Here each
is a separate tensor, such as `fp8.decoder.layers.3.mlp.linear_fc1.scale_fwd`. An amax is reduced
over all tensor and data parallel ranks, so ranks hold equal values and any layout can load them.
(Not with --tp-only-amax-red: data-parallel ranks then resume with those of the first.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.parallel import decoder_layers, expert_tensor_group

logger = logging.getLogger(__name__)

# Part of the tensor's name -> (entry of the module's fp8_meta, attribute)
_PARTS = {
    "scale_fwd": ("scaling_fwd", "scale"),
    "amax_history_fwd": ("scaling_fwd", "amax_history"),
    "scale_bwd": ("scaling_bwd", "scale"),
    "amax_history_bwd": ("scaling_bwd", "amax_history"),
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def is_delayed(config: TransformerConfig) -> bool:
    return bool(config.fp8) and config.fp8_recipe == "delayed"


def fp8_state(chunks: Sequence[GPTModel]) -> dict[str, ShardedTensor]:
    """Return the tensors of all modules that have run in FP8, by their names in a checkpoint."""
    return {
        key: _sharded(key, tensor)
        for name, module in _modules(chunks)
        for key, tensor in _tensors(name, module)
    }


def fp8_state_to_load(
    chunks: Sequence[GPTModel], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, ShardedTensor]:
    """Allocate the scales of this model; return those that the checkpoint has in the same shape."""
    for name, module in _modules(chunks):
        if f"fp8.{name}.scale_fwd" in stored:
            _allocate(module, chunks[0].config)
    state = fp8_state(chunks)
    found = {key: t for key, t in state.items() if stored.get(key) == tuple(t.global_shape)}
    if len(found) < len(state) or not found:
        logger.warning(
            "FP8: the checkpoint has no scales for %s of this model's modules (another recipe or "
            "--fp8-amax-history-len); they start anew",
            "some" if found else "any",
        )
    return found


@torch.no_grad()
def load_fp8_state(chunks: Sequence[GPTModel], loaded: Mapping[str, torch.Tensor]) -> None:
    for name, module in _modules(chunks):
        for key, tensor in _tensors(name, module):
            if key in loaded:
                tensor.copy_(loaded[key])


def _modules(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, Any]]:
    """Yield TransformerEngine's modules with matmuls, by names with global layer numbers."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            layer = _LAYER.match(name)
            if layer is None or not hasattr(module, "fp8_meta") or name.endswith("core_attention"):
                continue
            number = decoder_layers(chunk)[int(layer[1])].layer_number - 1
            yield _LAYER.sub(f"decoder.layers.{number}.", name), module


def _tensors(name: str, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for part, (entry, attribute) in _PARTS.items():
        if entry in module.fp8_meta:
            yield f"fp8.{name}.{part}", getattr(module.fp8_meta[entry], attribute)


def _allocate(module: Any, config: TransformerConfig) -> None:
    """Allocate FP8 state as the first forward pass would; that pass then keeps it."""
    module.fp8_meta["num_gemms"] = getattr(module, "num_gemms", 1)
    module.fp8_meta["recipe"] = get_fp8_recipe(config)
    module.init_fp8_meta_tensors(module.fp8_meta["recipe"])


def _sharded(key: str, tensor: torch.Tensor) -> ShardedTensor:
    """Return the sharded tensor; those of grouped experts are sharded in the last dimension."""
    state = parallel_state
    if ".experts." not in key:
        replica = (
            0,
            state.get_tensor_model_parallel_rank(),
            state.get_data_parallel_rank(with_context_parallel=True),
        )
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica)
    place = (
        tensor.ndim - 1,
        state.get_expert_model_parallel_rank(),
        state.get_expert_model_parallel_world_size(),
    )
    replica = (0, expert_tensor_group().rank(), state.get_expert_data_parallel_rank())
    return ShardedTensor.from_rank_offsets(key, tensor, place, replica_id=replica)
