"""RoPE: the parameters of a Hugging Face config, and the angles of packed tokens.

Frequencies come from transformers' own formulas, so every scaling that does not depend on the
sequence length works. MLA is the exception: it uses megatron-core's formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slime.backends.kernels.fused_ops import rotate
from slime.backends.megatron_utils.attention import PackedRows, uses_te_attention
from slime.config.checks.model_types import check_rope
from slime.core.errors import UserError
from slime.utils.device import device_type


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE parameters of a model; `frequencies` is None if they follow from the base alone.

    Linear scaling by 4 of a head of 4 with base 1e4: frequencies (0.25, 0.0025).
    """

    base: float
    percent: float = 1.0  # share of a head that RoPE applies to
    kind: str = "default"
    factor: float | None = None  # of RoPE scaling
    frequencies: tuple[float, ...] | None = None
    attention_factor: float = 1.0  # scales cosine and sine
    yarn: dict[str, Any] = field(default_factory=dict)  # megatron-core's fields, for MLA
    sections: tuple[int, int, int] | None = None  # frequencies of time, row and column in images


def read_rope(config: PretrainedConfig, *, latent: bool) -> Rope:
    """Return the RoPE parameters; raise ConfigError for a scaling that is not supported."""
    given = dict(config.rope_parameters)
    kind = given.get("rope_type", "default")
    check_rope(config.model_type, kind)
    base, percent = float(given["rope_theta"]), float(given.get("partial_rotary_factor") or 1.0)
    rope = Rope(base=base, percent=percent, kind=kind, sections=_sections(config, given))
    if kind == "default":
        return rope
    rope = replace(rope, factor=float(given["factor"]))
    if latent:
        _refuse_unlike_megatron(config, given)
        return replace(rope, yarn=_yarn(config, given))
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return replace(
        rope, frequencies=tuple(frequencies.tolist()), attention_factor=float(factor or 1.0)
    )


def _sections(config: PretrainedConfig, given: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return the frequencies of each direction in an image; they are interleaved: t, h, w, t, h, w."""
    if not given.get("mrope_section"):
        return None
    if not given.get("mrope_interleaved", True):
        raise UserError(
            "config.json of --hf-checkpoint says mrope_interleaved false: the Megatron backend trains "
            f"{config.model_type} only with true. Use --train-backend fsdp"
        )
    time, rows, columns = given["mrope_section"]
    return time, rows, columns


def _yarn(config: PretrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "rotary_scaling_factor": float(given["factor"]),
        "original_max_position_embeddings": original,
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": float(given.get("mscale") or 1.0),
        "mscale_all_dim": float(given.get("mscale_all_dim") or 0.0),
    }


def _refuse_unlike_megatron(config: PretrainedConfig, given: dict[str, Any]) -> None:
    """Raise UserError for YaRN options that megatron-core's MLA computes differently."""
    wrong = None
    if not given.get("truncate", True):
        wrong = "truncate false"
    elif given.get("attention_factor") is not None:
        wrong = f"attention_factor {given['attention_factor']}"
    elif bool(given.get("mscale")) != bool(given.get("mscale_all_dim")) and (
        given.get("mscale") != 1.0
    ):
        wrong = "only one of mscale and mscale_all_dim"
    if wrong is not None:
        raise UserError(
            f"config.json of --hf-checkpoint says {wrong} in rope_parameters: the Megatron backend does "
            f"not train {config.model_type} with that. Use --train-backend fsdp"
        )


def has_packed_rotary(config: TransformerConfig) -> bool:
    """Return whether RoPE takes one angle per token.

    MLA applies RoPE itself, TransformerEngine's attention and fused RoPE need offsets, and
    megatron-core applies interleaved RoPE to 4-dimensional tensors only.
    """
    own = config.multi_latent_attention or config.rotary_interleaved
    return not (own or config.apply_rope_fusion or uses_te_attention(config))


class PackedRotary(torch.nn.Module):
    """Replace a model's `rotary_pos_emb`: look up the angles of packed tokens once for all layers.

    megatron-core splits a packed sequence into samples and concatenates their angles in every
    layer, for queries and for keys. With one angle per token it skips both.
    """

    def __init__(self, inner: torch.nn.Module, sections: Sequence[int] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self._sections = sections
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
        if positions.ndim == 1:
            return angles[:, 0].index_select(0, positions)  # [T, 1, D]
        if self._sections is None:
            raise UserError(
                "config.json of --hf-checkpoint has no mrope_section in rope_parameters, which images need"
            )
        axes = _axes(self._sections, angles.shape[-1]).to(positions.device)
        columns = torch.arange(len(axes), device=positions.device)
        return angles[:, 0, 0][positions[:, axes], columns].unsqueeze(1)


def _axes(sections: Sequence[int], width: int) -> torch.Tensor:
    """Return for each column of the angles whether it rotates by time (0), row (1) or column (2).

    Sections (4, 2, 2) of 16 columns: 0 1 2 0 1 2 0 0, twice.
    """
    half = torch.zeros(width // 2, dtype=torch.long)
    for axis in (1, 2):
        half[axis : 3 * sections[axis] : 3] = axis
    return half.repeat(2)


@functools.cache
def install_fused_rotation() -> None:
    """Patch megatron's attention to apply RoPE with angles per token in one kernel, on a GPU."""
    from megatron.core.transformer import attention

    original = attention.apply_rotary_pos_emb
    if device_type() == "cpu":
        return

    def apply(
        t: torch.Tensor, freqs: torch.Tensor, config: TransformerConfig, **options: Any
    ) -> torch.Tensor:
        whole = freqs.ndim == 3 and freqs.shape[-1] == t.shape[-1]
        if whole and not config.rotary_interleaved and options.get("mscale", 1.0) == 1.0:
            return rotate(t, freqs)
        return original(t, freqs, config, **options)

    attention.apply_rotary_pos_emb = apply
