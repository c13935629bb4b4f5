"""Attention over packed samples for any Hugging Face model.

It is registered with transformers as `slime_packed`. Transformers builds no mask for a name without
a mask function; sample boundaries are passed as the keyword `packed`, which every model forwards to
its attention function.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from slime.backends.kernels.packed_attention import PackedLayout, attend_packed
from slime.core.errors import UserError

PACKED_ATTENTION = "slime_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, D]
    key: torch.Tensor,  # [1, kv heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, heads, D]. Dropout is not applied: log-probs must be deterministic."""
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} needs attention with {name}, which {PACKED_ATTENTION} has not; "
                "give an implementation that has it, e.g. --attn-implementation flash_attention_2 or eager"
            )
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    out = attend_packed(
        query, key, value, packed, scale=scaling, window=sliding_window or None, sinks=s_aux
    )
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
