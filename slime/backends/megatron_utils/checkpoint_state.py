"""State of the model, of Megatron's optimizers and of FP8 scaling in a torch_dist checkpoint.

Model: a norm is a separate module or fused into the next linear layer, and its name differs. Other
tools use either name too. A checkpoint has the names of the model that wrote it; the model that
loads it uses whichever name is stored.

Optimizer: Megatron chains several optimizers (experts that are sharded have their own) and saves
their parameter groups, so a chain of another length cannot load the checkpoint. All of a group but
its step count is known when loading, so here only tensors are saved, per parameter.

FP8: TransformerEngine pickles the scales and amax histories of delayed scaling into `_extra_state`,
and from 2.20 on refuses to load that. Here each is a separate tensor, such as
`fp8.decoder.layers.3.mlp.linear_fc1.scale_fwd`. An amax is reduced over all tensor and data
parallel ranks, so ranks hold equal values and any layout can load them. (With
--tp-only-amax-red all data-parallel ranks resume with the values of the first.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.hf_weights.rules import canonical
from slime.backends.megatron_utils.parallel import decoder_layers, expert_tensor_group

logger = logging.getLogger(__name__)

_EXTRA_STATE = "._extra_state"
_STATE, _KIND, _GROUPS = "param_state", "param_state_sharding_type", "param_groups"
_MASTERS = "fp32_from_fp16_params"
# FP8: part of the tensor's name -> (entry of the module's fp8_meta, attribute)
_PARTS = {
    "scale_fwd": ("scaling_fwd", "scale"),
    "amax_history_fwd": ("scaling_fwd", "amax_history"),
    "scale_bwd": ("scaling_bwd", "scale"),
    "amax_history_bwd": ("scaling_bwd", "amax_history"),
}
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def drop_extra_state(state: dict[str, Any]) -> None:
    """Remove TransformerEngine's pickled state; `fp8_state` saves its scales as tensors."""
    for name, value in list(state.items()):
        if isinstance(value, ShardedObject) and _EXTRA_STATE in f".{name}":
            del state[name]


def use_stored_keys(state: dict[str, Any], stored: Collection[str]) -> None:
    """Rename norms in a model's sharded state to the names that the checkpoint has for them."""
    by_canonical = {canonical(key): key for key in stored}
    for tensor in state.values():
        if isinstance(tensor, ShardedTensor) and tensor.key not in stored:
            tensor.key = by_canonical.get(canonical(tensor.key), tensor.key)


def has_stacked_layers(stored: Iterable[str]) -> bool:
    """Return whether a tensor holds all layers, as Megatron's tools write models with equal layers."""
    names = (key.split(".") for key in stored if key.startswith("decoder.layers."))
    return any(not name[2].isdecimal() for name in names)


def without_extra_state(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(_EXTRA_STATE)]


def split_into_parts(state: dict[str, Any]) -> dict[str, Any]:
    """Split tensors that are saved in parts, such as gate and up, into copies of those parts.

    The writer would copy all parts that are views. Here one tensor at a time is copied and freed.
    """
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            value = split_into_parts(value)
        elif isinstance(value, ShardedTensorFactory):
            value, whole = value.build(), value.data
            for part in sharded_tensors(value):
                assert part.data is not None, "megatron-core builds parts as views of the tensor"
                part.data = part.data.clone()
            whole.untyped_storage().resize_(0)
        parts[key] = value
    return parts


def sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from sharded_tensors(state.build())
    elif isinstance(state, dict):
        for value in state.values():
            yield from sharded_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from sharded_tensors(value)


def optimizer_state(
    chain: ChainedOptimizer,
    model_state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the state to save or load of every optimizer of the chain."""
    state = {}
    for number, optimizer in enumerate(_without_stubs(chain)):
        distributed = isinstance(optimizer, DistributedOptimizer)
        # Save in loading mode too: moments that were never updated are then zeros, not absent.
        own = optimizer.sharded_state_dict(
            model_state, is_loading or not distributed, metadata=dict(metadata)
        )
        if distributed:
            own = {_STATE: own[_STATE]}
        else:
            del _torch_state(own)[_GROUPS]
        if isinstance(chain, LayerWiseDistributedOptimizer):
            own = _written_by_owner(own)
        state[str(number)] = own
    return state


def load_optimizer_state(chain: ChainedOptimizer, state: dict[str, Any], num_steps: int) -> None:
    for number, optimizer in enumerate(_without_stubs(chain)):
        own = state[str(number)]
        # megatron-core's base class is annotated as if it returned None.
        groups = cast(dict[str, Any], optimizer.state_dict())
        for group in _torch_state(groups)[_GROUPS]:
            group["step"] = num_steps
        if isinstance(optimizer, DistributedOptimizer):
            own = {**groups, _STATE: own[_STATE], _KIND: "fully_reshardable"}
        else:
            _torch_state(own)[_GROUPS] = _torch_state(groups)[_GROUPS]
            if isinstance(own.get(_MASTERS), dict):
                own[_MASTERS] = _as_lists(own[_MASTERS], groups[_MASTERS])
        optimizer.load_state_dict(own)


def _written_by_owner(state: Any) -> Any:
    """Let the one data-parallel rank with a tensor write it; turn lists, which vary, into dicts."""
    if isinstance(state, list):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {key: _written_by_owner(value) for key, value in state.items()}
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        assert isinstance(state.replica_id, tuple), "(pipeline, tensor, data) ranks"
        state.replica_id = (*state.replica_id[:2], 0)
    return state


def _as_lists(masters: dict[int, dict[int, Any]], like: list[list[Any]]) -> list[list[Any]]:
    return [
        [masters[number][place] for place in range(len(group))] for number, group in enumerate(like)
    ]


def _torch_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer, which an fp32 optimizer does not wrap."""
    return state.get("optimizer", state)


def _without_stubs(chain: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that are not stubs for kinds of parameters missing on this rank."""
    return [o for o in chain.chained_optimizers if not getattr(o, "is_stub_optimizer", False)]


# ---- FP8


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
            "--fp8-amax-history-len); they start at their initial values",
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
