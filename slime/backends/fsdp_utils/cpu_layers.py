"""Decoder layers of Llama-like models on a CPU in few passes over memory.

Between their matrix products Hugging Face's layers read and write activations some forty times, half
of a step where the model is small. The same mathematics on the same parameters::

    x ─ norm ─ qkv ─ split, norm, rotate, pad ─ attention ─ out ─ add and norm ─ gate_up ─ silu * up ─ down ─▶ + x
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slime.backends.fsdp_utils.attention import PACKED_ATTENTION
from slime.backends.kernels.cpu_ops import (
    Heads,
    add_rms_norm,
    cpu_library,
    drop_padding,
    rms_norm,
    silu_mul,
    split_heads,
)
from slime.backends.kernels.packed_attention import PackedLayout, attend_groups

_LAYERS = {"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


def fuse_layers(hf: nn.Module) -> int:
    """Replace the forward of every layer this file knows, if samples are packed; how many."""
    config: Any = hf.config
    packed = config._attn_implementation == PACKED_ATTENTION
    if not packed or getattr(config, "hidden_act", None) != "silu" or cpu_library() is None:
        return 0
    known = [module for module in hf.modules() if _is_known(type(module))]
    for module in known:
        module.forward = _Layer(module)
    return len(known)


def _is_known(kind: type[nn.Module]) -> bool:
    return kind.__name__ in _LAYERS and kind.__module__.startswith("transformers.models.")


class _Layer:
    """Looks parameters up at each call: FSDP replaces them by the gathered ones."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, T, H]
        attention_mask: None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        packed: PackedLayout,
        **_: object,
    ) -> torch.Tensor:
        layer, x = self._layer, hidden_states[0]
        before, after, mlp = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp
        normed = rms_norm(x, before.weight, before.variance_epsilon)
        attended = _attend(layer.self_attn, normed, position_embeddings, packed)
        x, normed = add_rms_norm(x, attended, after.weight, after.variance_epsilon)
        active = silu_mul(_product(normed, mlp.gate_proj, mlp.up_proj))
        return (x + mlp.down_proj(active)).unsqueeze(0)


def _attend(
    attention: Any,
    normed: torch.Tensor,  # [T, H]
    position_embeddings: tuple[torch.Tensor, torch.Tensor],  # [1, T, D]
    packed: PackedLayout,
) -> torch.Tensor:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    num_query, num_key = (p.out_features // attention.head_dim for p in projections[:2])
    eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
    cosines, sines = position_embeddings
    padding = None
    if packed.gather is not None and packed.scatter is not None:
        padding = (packed.gather, packed.scatter)
    query, key, value = split_heads(
        _product(normed, *projections),
        (getattr(norms[0], "weight", None), getattr(norms[1], "weight", None)),
        cosines[0],
        sines[0],
        padding,
        Heads(num_query=num_query, num_key=num_key, dim=attention.head_dim, eps=eps),
    )
    window = getattr(attention, "sliding_window", None)
    if window is not None and window >= packed.max_seqlen:
        window = None
    out = attend_groups(query, key, value, packed, scale=attention.scaling, window=window)
    out = out.flatten(1)
    return attention.o_proj(out if padding is None else drop_padding(out, padding))


def _product(x: torch.Tensor, *linears: nn.Linear) -> torch.Tensor:
    """What the linear layers make of x, side by side, in one product."""
    weight = torch.cat([linear.weight for linear in linears])
    has_bias = linears[0].bias is not None
    return F.linear(x, weight, torch.cat([n.bias for n in linears]) if has_bias else None)
