"""Gated delta nets and gated attention of megatron's layers (Qwen3-Next, Qwen3.5), on packed samples.

megatron-core's delta net has the parameters, their sharding and checkpoints; its forward pass needs
flash-linear-attention and refuses packed samples and context parallelism. Here state and convolution
restart at every sample. Under context parallelism ranks exchange tokens for heads, so each computes whole
samples for its share of the heads::

    in_proj ─▶ all-to-all ─▶ convolution, delta rule ─▶ all-to-all ─▶ gated norm ─▶ out_proj
    [T / CP, heads]    [T, heads / CP]                      [T / CP, heads]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net as core
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.algorithms.delta_kernels import gated_delta_net
from slime.algorithms.gated_delta import DeltaHeads
from slime.backends.megatron_utils.attention import PackedRows, padded_rows
from slime.backends.megatron_utils.muon import SPLIT_ROWS
from slime.utils.compiled import compiled_on_gpu

core.HAVE_FLA = True  # only the forward pass needs it, and is replaced


class PackedDeltaNet(core.GatedDeltaNet):
    """Replace `self_attention` in the spec of a layer with linear attention.

    `in_proj` has the rows of queries, keys, values, gates z, and b and a of this rank's heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: core.GatedDeltaNetSubmodules,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection)
        assert self.key_head_dim is not None and self.value_head_dim is not None
        self._cp = pg_collection.cp
        ranks = self.tp_size * self._cp.size()
        self._heads = DeltaHeads(
            num_key=self.num_key_heads // ranks,
            num_value=self.num_value_heads // ranks,
            key_dim=self.key_head_dim,
            value_dim=self.value_head_dim,
        )
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        self._conv_widths = [keys, keys, values]
        numbers = [self.num_v_heads_local_tp] * 2
        self._widths = [2 * keys + values, values, *numbers]
        setattr(self.in_proj.weight, SPLIT_ROWS, [keys, keys, values, values, *numbers])

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - called by layers, by keyword
        self,
        hidden_states: torch.Tensor,  # [S, B, H], or its sequence shard
        attention_mask: None = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projected, _ = self.in_proj(hidden_states)
        length, count = projected.shape[:2]
        rows = packed_seq_params
        if rows is None:
            rows = padded_rows(length, count, self._cp, projected.device)
        flat = projected.transpose(0, 1).flatten(0, 1)  # [T, ...]
        mixed, z, b, a = flat.split(self._widths, dim=1)
        out = self._mix(mixed, b, a, rows)
        gated = _gated(self._norm(out), z.unflatten(1, (-1, self.value_head_dim)))
        return self.out_proj(gated.reshape(count, length, -1).transpose(0, 1).contiguous())

    def _mix(
        self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, rows: PackedRows
    ) -> torch.Tensor:
        """Return [T, value heads of this tensor rank, value dim] of columns [T, ...] of qkv, b and a."""
        if rows.segments is not None:
            qkv = mixed.split(self._conv_widths, dim=1)
            *qkv, b, a = self._tokens_for_heads([*qkv, b, a], rows)
            mixed = torch.cat(qkv, dim=1)
        conv = self.conv1d.weight.squeeze(1).split(self._conv_widths)
        weight = torch.cat([self._share(rows_of_one) for rows_of_one in conv])
        a_log, dt_bias = self._share(self.A_log).float(), self._share(self.dt_bias)
        decay = -a_log.exp() * F.softplus(a.float() + dt_bias)
        out = gated_delta_net(mixed, weight, decay, b.sigmoid(), self._heads, rows.lens)
        return out if rows.segments is None else self._heads_for_tokens(out, rows)

    def _share(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the rows of this context rank's heads."""
        return parameter.chunk(self._cp.size())[self._cp.rank()]

    def _tokens_for_heads(
        self, columns: Sequence[torch.Tensor], rows: PackedRows
    ) -> list[torch.Tensor]:
        """Send each context rank the columns of its heads; return those of all tokens, in order."""
        assert rows.segments is not None
        parts = [column.unflatten(1, (self._cp.size(), -1)) for column in columns]
        widths = [part.shape[-1] for part in parts]
        exchanged = all_to_all(self._cp, torch.cat(parts, dim=-1).transpose(0, 1))
        whole = exchanged.flatten(0, 1).index_select(0, rows.segments.place)
        return list(whole.split(widths, dim=1))

    def _heads_for_tokens(self, out: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        assert rows.segments is not None
        by_rank = out.index_select(0, rows.segments.gathered).unflatten(0, (self._cp.size(), -1))
        return all_to_all(self._cp, by_rank).transpose(0, 1).flatten(1, 2)

    def _norm(self, out: torch.Tensor) -> torch.Tensor:
        weight = self.out_norm.weight
        if not self.config.sequence_parallel:
            # Each tensor rank has the gradient of its heads. With sequence parallelism megatron sums it.
            weight = copy_to_tensor_model_parallel_region(weight, self.pg_collection.tp)
        return F.rms_norm(out, weight.shape, weight, self.config.layernorm_epsilon)


@compiled_on_gpu
def _gated(normed: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (normed * F.silu(z.float())).to(normed.dtype)


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by a gate, also with more tensor ranks than KV heads.

    megatron-core 0.16.1 then gives a rank its query heads, but the gates of all heads of the group.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        head, groups = config.kv_channels, config.num_query_groups
        assert head is not None and groups is not None
        queries = config.num_attention_heads // groups * head
        linear: Any = self.linear_qkv
        setattr(linear.weight, SPLIT_ROWS, [queries, queries, head, head])

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        with_gate: Any = super().get_query_key_value_tensors(*args, **kwargs)
        query, key, value, gate = with_gate
        if query.shape[2] < gate.shape[2]:
            parts = gate.shape[2] // query.shape[2]
            gate = gate.chunk(parts, dim=2)[self.pg_collection.tp.rank() % parts]
        return query, key, value, gate
