"""State of the model and of Megatron's optimizers in a torch_dist checkpoint.

Model: a norm is a separate module or fused into the next linear layer, and its name differs. Other
tools use either name too. A checkpoint has the names of the model that wrote it; the model that
loads it uses whichever name is stored.

Optimizer: Megatron chains several optimizers (experts that are sharded have their own) and saves
their parameter groups, so a chain of another length cannot load the checkpoint. All of a group but
its step count is known when loading, so here only tensors are saved, per parameter.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, cast

from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

_EXTRA_STATE = "._extra_state"
# (separate norm, norm fused into a linear layer)
_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)
_STATE, _KIND, _GROUPS = "param_state", "param_state_sharding_type", "param_groups"
_MASTERS = "fp32_from_fp16_params"


def drop_extra_state(state: dict[str, Any]) -> None:
    """Remove TransformerEngine's pickled state; `fp8_state` saves its scales as tensors."""
    for name in [name for name, value in state.items() if _is_extra(name, value)]:
        del state[name]


def use_stored_keys(state: dict[str, Any], stored: Container[str]) -> None:
    """Rename norms in a model's sharded state to the names that the checkpoint has for them."""
    for tensor in state.values():
        if isinstance(tensor, ShardedTensor) and tensor.key not in stored:
            tensor.key = next(
                (key for key in _other_names(tensor.key) if key in stored), tensor.key
            )


def without_extra_state(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(_EXTRA_STATE)]


def optimizer_state(
    chain: ChainedOptimizer,
    model_state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the state to save or load of every optimizer of the chain."""
    state = {}
    for number, optimizer in enumerate(_real(chain)):
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
            own = _of_one_owner(own)
        state[str(number)] = own
    return state


def load_optimizer_state(chain: ChainedOptimizer, state: dict[str, Any], num_steps: int) -> None:
    for number, optimizer in enumerate(_real(chain)):
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


def _is_extra(name: str, value: object) -> bool:
    return isinstance(value, ShardedObject) and _EXTRA_STATE in f".{name}"


def _other_names(key: str) -> Iterator[str]:
    for pair in _NORMS:
        for mine, other in (pair, pair[::-1]):
            if mine in key:
                yield key.replace(mine, other)


def _of_one_owner(state: Any) -> Any:
    """Let the one data-parallel rank with a tensor write it; turn lists, which vary, into dicts."""
    if isinstance(state, list):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {key: _of_one_owner(value) for key, value in state.items()}
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


def _real(chain: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that are not stubs for kinds of parameters missing on this rank."""
    return [o for o in chain.chained_optimizers if not getattr(o, "is_stub_optimizer", False)]
