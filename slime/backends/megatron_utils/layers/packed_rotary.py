"""RoPE angles of packed tokens, looked up once for all layers.

megatron-core splits a packed sequence into samples and concatenates their angles in every layer,
for queries and for keys. With one angle per token it skips both.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.kernels.fused_ops import rotate
from slime.backends.megatron_utils.sequence_layout import PackedRows
from slime.utils.device import device_type


def has_packed_rotary(config: TransformerConfig) -> bool:
    """Return whether RoPE takes one angle per token.

    MLA applies RoPE itself, TransformerEngine's attention and fused RoPE need offsets, and
    megatron-core applies interleaved RoPE to 4-dimensional tensors only.
    """
    own = config.multi_latent_attention or config.rotary_interleaved
    return not (own or config.apply_rope_fusion or uses_te_attention(config))


def uses_te_attention(config: TransformerConfig) -> bool:
    """Return whether --attention-backend selects an attention of TransformerEngine.

    flash is the package flash-attn if it supports the model, otherwise torch's FlashAttention.
    """
    if config.transformer_impl != "transformer_engine":
        return False
    if config.attention_backend in (AttnBackend.fused, AttnBackend.unfused):
        return True
    plain = config.softmax_type == "vanilla" and not config.multi_latent_attention
    whole = config.context_parallel_size == 1 and config.params_dtype is torch.bfloat16
    return config.attention_backend is AttnBackend.flash and plain and whole and has_flash_attn()


def has_flash_attn() -> bool:
    """Return whether FlashAttention 2 or 3 is installed where TransformerEngine imports it."""
    return any(find_spec(package) for package in ("flash_attn", "flash_attn_interface"))


class PackedRotary(torch.nn.Module):
    """Replace a model's `rotary_pos_emb`."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Store the positions; megatron passes the packed samples here right before `forward`."""
        rows = args[-1]
        self._positions = rows.position_ids if isinstance(rows, PackedRows) else None
        return self.inner.get_rotary_seq_len(*args)  # type: ignore[operator]

    def forward(self, length: int, **options: Any) -> torch.Tensor:
        angles = self.inner(length, **options)
        positions, self._positions = self._positions, None
        if positions is None:
            return angles
        return angles[:, 0].index_select(0, positions)  # [T, 1, D]


def install_fused_rotation() -> None:
    """Patch megatron's attention to apply RoPE with angles per token in one kernel, on a GPU."""
    from megatron.core.transformer import attention

    original = attention.apply_rotary_pos_emb
    if device_type() == "cpu" or hasattr(original, "fused"):
        return

    def apply(
        t: torch.Tensor, freqs: torch.Tensor, config: TransformerConfig, **options: Any
    ) -> torch.Tensor:
        whole = freqs.ndim == 3 and freqs.shape[-1] == t.shape[-1]
        if whole and not config.rotary_interleaved and options.get("mscale", 1.0) == 1.0:
            return rotate(t, freqs)
        return original(t, freqs, config, **options)

    apply.fused = True  # type: ignore[attr-defined]
    attention.apply_rotary_pos_emb = apply
