"""Gated delta nets of Hugging Face models, with a state and a convolution that restart at every sample.

Hugging Face's layers would carry both over from one packed sample to the next. slime keeps their
projections and replaces the convolution, the delta rule and the output norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slime.algorithms.delta_kernels import gated_delta_net
from slime.algorithms.delta_layers import (
    conv_weight,
    find_delta_nets,
    finish,
    heads_of,
    project,
)
from slime.backends.kernels.packed_attention import PackedLayout
from slime.core.errors import UserError


def pack_delta_nets(hf: nn.Module, *, padded: bool) -> int:
    """Patch the forward of every gated delta net; return their number."""
    found = find_delta_nets(hf)
    for module in found:
        module.forward = PackedDeltaNet(module, padded=padded)
    return len(found)


class PackedDeltaNet:
    """Forward of a delta net. It reads the weights at each call: FSDP swaps in the unsharded ones."""

    def __init__(self, module: Any, *, padded: bool) -> None:
        self._module, self._padded = module, padded
        self._heads = heads_of(module)

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [rows, length, H]
        cache_params: None = None,
        attention_mask: None = None,
        packed: PackedLayout | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        assert cache_params is None and attention_mask is None, "the trainer passes neither"
        module, shape = self._module, hidden_states.shape
        inputs, z = project(module, hidden_states.reshape(1, -1, shape[-1]))
        lens = self._lens(shape, packed, cu_seq_lens_q)
        out = gated_delta_net(
            inputs.mixed_qkv, conv_weight(module), inputs.decay, inputs.beta, self._heads, lens
        )
        return finish(module, out, z).reshape(*shape[:2], -1)

    def _lens(
        self,
        shape: torch.Size,
        packed: PackedLayout | None,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[int, ...]:
        """Return the lengths of the samples; padding follows a sample and does not affect it."""
        if self._padded:
            return (shape[1],) * shape[0]
        if packed is not None:
            return packed.lens
        if cu_seqlens is not None:
            return tuple(cu_seqlens.diff().tolist())
        raise UserError(
            f"{type(self._module).__name__} got no boundaries of packed samples: use "
            "--attn-implementation slime_packed or --qkv-format bshd"
        )
