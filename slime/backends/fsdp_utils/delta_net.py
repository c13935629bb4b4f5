"""Gated delta nets of Hugging Face models, with a state and a convolution that start anew per sample.

Hugging Face's layers see one row of tokens and would carry both over from one packed sample to the
next. Their projections and norm stay; convolution and delta rule are slime's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slime.algorithms.gated_delta import DeltaHeads, gated_delta_net
from slime.backends.kernels.packed_attention import PackedLayout
from slime.core.errors import UserError

# The classes differ in their input projections alone.
_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


def pack_delta_nets(hf: nn.Module, *, padded: bool) -> int:
    """Patch the forward of every gated delta net; return their number."""
    found = [module for module in hf.modules() if type(module).__name__ in _CLASSES]
    for module in found:
        module.forward = PackedDeltaNet(module, padded=padded)
    return len(found)


class PackedDeltaNet:
    """Reads weights at each call, since FSDP replaces them by the unsharded ones."""

    def __init__(self, module: Any, *, padded: bool) -> None:
        self._module, self._padded = module, padded
        self._heads = DeltaHeads(
            num_key=module.num_k_heads,
            num_value=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [rows, length, H]
        cache_params: None = None,
        attention_mask: None = None,
        packed: PackedLayout | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        assert cache_params is None and attention_mask is None, "the trainer gives neither"
        module, shape = self._module, hidden_states.shape
        qkv, z, b, a = self._project(hidden_states.reshape(1, -1, shape[-1]))
        decay = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
        weight = module.conv1d.weight.squeeze(1)
        lens = self._lens(shape, packed, cu_seq_lens_q)
        out = gated_delta_net(qkv, weight, decay, b.sigmoid(), self._heads, lens)
        normed = module.norm(out.flatten(0, 1), z.reshape(-1, self._heads.value_dim))
        return module.out_proj(normed.reshape(*shape[:2], -1))

    def _lens(
        self,
        shape: torch.Size,
        packed: PackedLayout | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[int, ...]:
        """Return the lengths of the samples; padding is behind a sample and changes nothing in it."""
        if self._padded:
            return (shape[1],) * shape[0]
        if packed is not None:
            return packed.lens
        if cu_seqlens is not None:
            return tuple(cu_seqlens.diff().tolist())
        raise UserError(
            f"{type(self._module).__name__} was not told where packed samples end: use "
            "--attn-implementation slime_packed or --qkv-format bshd"
        )

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values of all heads side by side, z, b and a of each token."""
        module = self._module
        if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next interleaves them by key head
            projected = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            query, key, value, z, b, a = module.fix_query_key_value_ordering(*projected)
            qkv = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1)
        else:
            qkv, z = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
            b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
        return tuple(x.squeeze(0) for x in (qkv, z, b, a))
