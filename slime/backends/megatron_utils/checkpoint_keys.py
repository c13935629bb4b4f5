"""Names of tensors in a torch_dist checkpoint, for TransformerEngine's layers and ours alike.

A norm is a module of its own or fused into the linear layer behind it, and its name follows. Other tools
name them either way too. A checkpoint is written with the names of the model that writes it; the model
that reads it takes whichever name is stored.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

_EXTRA_STATE = "._extra_state"
# (norm of its own, norm fused into a linear layer)
_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)


def drop_extra_state(state: dict[str, Any]) -> None:
    """Remove what TransformerEngine's layers pickle; `fp8_state` keeps what matters of it as tensors."""
    for name in [name for name, value in state.items() if _is_extra(name, value)]:
        del state[name]


def use_stored_keys(state: dict[str, Any], stored: Container[str]) -> None:
    """Rename norms of a model's sharded state to the names that the checkpoint has them under."""
    for tensor in state.values():
        if isinstance(tensor, ShardedTensor) and tensor.key not in stored:
            tensor.key = next(
                (key for key in _other_names(tensor.key) if key in stored), tensor.key
            )


def without_extra_state(names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(_EXTRA_STATE)]


def _is_extra(name: str, value: object) -> bool:
    return isinstance(value, ShardedObject) and _EXTRA_STATE in f".{name}"


def _other_names(key: str) -> Iterator[str]:
    for pair in _NORMS:
        for mine, other in (pair, pair[::-1]):
            if mine in key:
                yield key.replace(mine, other)
