"""The part of Megatron's optimizers that a checkpoint holds.

Megatron chains several optimizers, one for experts where those are spread over ranks, and keeps their
parameter groups in the checkpoint, so that one saved with a chain of another length cannot be loaded.
Of the groups only the number of steps is not known anyway. Here just the tensors are saved, by parameter.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

_STATE, _KIND, _GROUPS = "param_state", "param_state_sharding_type", "param_groups"
_MASTERS = "fp32_from_fp16_params"


def optimizer_state(
    chain: ChainedOptimizer,
    model_state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """What dist_checkpointing saves, or is asked to load, of every optimizer of the chain."""
    state = {}
    for number, optimizer in enumerate(_real(chain)):
        distributed = isinstance(optimizer, DistributedOptimizer)
        # As if it were loaded: moments that were never updated are zeros then, not absent.
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
        groups = optimizer.state_dict()
        for group in _torch_state(groups)[_GROUPS]:
            group["step"] = num_steps
        if isinstance(optimizer, DistributedOptimizer):
            own = {**groups, _STATE: own[_STATE], _KIND: "fully_reshardable"}
        else:
            _torch_state(own)[_GROUPS] = _torch_state(groups)[_GROUPS]
            if isinstance(own.get(_MASTERS), dict):
                own[_MASTERS] = _as_lists(own[_MASTERS], groups[_MASTERS])
        optimizer.load_state_dict(own)


def _of_one_owner(state: Any) -> Any:
    """Tensors that one data-parallel rank has alone, each to be written by it; lists, which differ from
    rank to rank, as dictionaries."""
    if isinstance(state, list):
        state = dict(enumerate(state))
    if isinstance(state, dict):
        return {key: _of_one_owner(value) for key, value in state.items()}
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        state.replica_id = (*state.replica_id[:2], 0)
    return state


def _as_lists(masters: dict[int, dict[int, Any]], like: list[list[Any]]) -> list[list[Any]]:
    return [
        [masters[number][place] for place in range(len(group))] for number, group in enumerate(like)
    ]


def _torch_state(state: dict[str, Any]) -> dict[str, Any]:
    """The part of torch's optimizer, which an optimizer in fp32 has nothing around."""
    return state.get("optimizer", state)


def _real(chain: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Without those that stand in where a rank has no parameters of a kind."""
    return [o for o in chain.chained_optimizers if not getattr(o, "is_stub_optimizer", False)]
