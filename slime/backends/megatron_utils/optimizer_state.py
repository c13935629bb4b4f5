"""The part of Megatron's optimizers that a checkpoint holds.

Megatron chains several optimizers, one for experts where those are spread over ranks, and keeps their
parameter groups in the checkpoint, so that one saved with a chain of another length cannot be loaded.
Of the groups only the number of steps is not known anyway. Here just the tensors are saved, by parameter.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

_STATE, _KIND, _GROUPS = "param_state", "param_state_sharding_type", "param_groups"


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
        own = optimizer.sharded_state_dict(model_state, is_loading, metadata=dict(metadata))
        if isinstance(optimizer, DistributedOptimizer):
            own = {_STATE: own[_STATE]}
        else:
            del _torch_state(own)[_GROUPS]
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
        optimizer.load_state_dict(own)


def _torch_state(state: dict[str, Any]) -> dict[str, Any]:
    """The part of torch's optimizer, which an optimizer in fp32 has nothing around."""
    return state.get("optimizer", state)


def _real(chain: ChainedOptimizer) -> list[MegatronOptimizer]:
    """Without those that stand in where a rank has no parameters of a kind."""
    return [o for o in chain.chained_optimizers if not getattr(o, "is_stub_optimizer", False)]
