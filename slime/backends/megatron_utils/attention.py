"""Attention of megatron's layers: packed or padded samples, context parallelism, sinks, windows.

Without TransformerEngine, megatron-core's own supports neither packed samples nor context
parallelism. Under context parallelism the keys and values of all ranks are all-gathered; the
backward pass reduce-scatters their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from slime.backends.kernels.packed_attention import (
    attend_packed,
    attend_segments,
)
from slime.backends.megatron_utils.sequence_layout import ContextSegments, PackedRows, packed_rows
from slime.core.types import ParallelInfo


class PackedAttention(MegatronModule):
    """Replace `core_attention` in a layer spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self._groups = pg_collection
        self._scale = softmax_scale
        self._window = _window(config, layer_number)
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, dim=0, stride=1)

    def forward(
        self,
        query: torch.Tensor,  # packed [T, heads, D], else [S, B, heads, D]
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        """Return packed [T, heads * Dv], else [S, B, heads * Dv]."""
        if packed_seq_params is not None:
            return self._attend(query, key, value, packed_seq_params).flatten(1)
        length, count = query.shape[:2]
        rows = self._padded_rows(length, count, query.device)
        query, key, value = (
            x.transpose(0, 1).reshape(-1, *x.shape[2:]) for x in (query, key, value)
        )
        out = self._attend(query, key, value, rows)
        return out.view(count, length, -1).transpose(0, 1).contiguous()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._groups.tp,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows
    ) -> torch.Tensor:
        options: dict[str, Any] = {
            "scale": self._scale,
            "window": self._window,
            "sinks": self.softmax_offset,
        }
        if rows.segments is None:
            assert rows.layout is not None
            return attend_packed(query, key, value, rows.layout, **options)
        key, value = (self._gather(x, rows.segments) for x in (key, value))
        segments = rows.segments
        return attend_segments(
            query,
            key,
            value,
            (segments.q_lens, segments.k_lens),
            (segments.cu_q, segments.cu_k),
            **options,
        )

    def _gather(self, local: torch.Tensor, segments: ContextSegments) -> torch.Tensor:
        whole = gather_from_sequence_parallel_region(local, group=self._groups.cp)
        return whole.index_select(0, segments.kv_index)

    def _padded_rows(self, length: int, count: int, device: torch.device) -> PackedRows:
        """Return padded samples as packed ones of equal length; causal masks hide right padding."""
        group = self._groups.cp
        parallel = ParallelInfo(cp_rank=group.rank(), cp_size=group.size())
        return packed_rows([length * group.size()] * count, parallel, device)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many tokens a query of this layer attends to, itself included; None: all."""
    skip: Any = (
        config.window_attn_skip_freq
    )  # None too, although megatron-core's annotation lacks it
    if is_layer_window_attention(config.window_size, skip, layer_number):
        assert config.window_size is not None
        return config.window_size[0] + 1
    return None
