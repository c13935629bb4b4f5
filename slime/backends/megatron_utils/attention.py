"""Attention of megatron's layers over packed or padded samples.

Without TransformerEngine, megatron-core's own attention supports neither packed samples nor context
parallelism. Under context parallelism the keys and values of all ranks are all-gathered; the
backward pass reduce-scatters their gradients. `PackedRows` holds the offsets of a micro-batch's
samples on this rank, computed once and used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from slime.backends.kernels.packed_attention import (
    PackedLayout,
    attend_packed,
    attend_segments,
    packed_layout,
)
from slime.core.packing import zigzag_index
from slime.core.types import ParallelInfo


class PackedAttention(MegatronModule):
    """Replace `core_attention` in a layer spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
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
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return packed [T, heads * Dv], else [S, B, heads * Dv]."""
        if packed_seq_params is not None:
            return self._attend(query, key, value, packed_seq_params).flatten(1)
        length, count = query.shape[:2]
        rows = padded_rows(length, count, self._groups.cp, query.device)
        query, key, value = (
            x.transpose(0, 1).reshape(-1, *x.shape[2:]) for x in (query, key, value)
        )
        out = self._attend(query, key, value, rows)
        return out.reshape(count, length, -1).transpose(0, 1).contiguous()

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


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many tokens a query of this layer attends to, itself included; None: all."""
    skip: Any = config.window_attn_skip_freq  # may be None, unlike megatron-core's annotation
    if is_layer_window_attention(config.window_size, skip, layer_number):
        assert config.window_size is not None
        return config.window_size[0] + 1
    return None


@dataclass(frozen=True, kw_only=True)
class ContextSegments:
    """The keys that one context rank's queries attend to, among those gathered from all ranks.

    Two samples of 4 tokens over two ranks, rank 0 holds tokens 0 and 3 of each::

        q_lens   = (1, 1, 1, 1)      two chunks of each sample
        k_lens   = (1, 4, 1, 4)      a chunk attends to its sample up to its own end
        kv_index                     indices of those keys among the gathered ones, 10 in all
        gathered = [0, 3, 4, 7, 1, 2, 5, 6]   token of the whole samples at each gathered index
        place    = [0, 4, 5, 1, 2, 6, 7, 3]   gathered index of each token
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    kv_index: torch.Tensor  # [sum of k_lens]
    cu_q: torch.Tensor  # [segments + 1] int32
    cu_k: torch.Tensor
    gathered: torch.Tensor  # [T of all ranks]
    place: torch.Tensor


@dataclass
class PackedRows(PackedSeqParams):
    """PackedSeqParams of megatron's layers, with the fields of `PackedAttention` and `Replay`."""

    lens: tuple[int, ...] = ()  # of the samples over all context ranks, with padding
    layout: PackedLayout | None = None  # without context parallelism
    segments: ContextSegments | None = None  # with context parallelism
    position_ids: torch.Tensor | None = None  # [T] or [T, 3], for RoPE looked up per token
    images: Any = None  # vision.ImageFeatures, on the first pipeline stage
    routed_experts: torch.Tensor | None = None  # [T, layers, experts per token], to replay
    recorded: dict[int, torch.Tensor] | None = None  # experts chosen, by layer


def packed_rows(lens: list[int], parallel: ParallelInfo, device: torch.device) -> PackedRows:
    """Return the rows of samples whose padded lengths over all context ranks are `lens`."""
    cu_seqlens = _offsets(lens, device)
    layout = segments = None
    if parallel.cp_size == 1:
        layout = packed_layout(lens, device)
    else:
        segments = context_segments(np.array(lens), parallel, device)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lens),
        max_seqlen_kv=max(lens),
        lens=tuple(lens),
        layout=layout,
        segments=segments,
    )


def padded_rows(length: int, count: int, group: Any, device: torch.device) -> PackedRows:
    """Return padded samples as packed ones of equal length; causal layers ignore right padding."""
    parallel = ParallelInfo(cp_rank=group.rank(), cp_size=group.size())
    return packed_rows([length * group.size()] * count, parallel, device)


def context_segments(
    lens: np.ndarray, parallel: ParallelInfo, device: torch.device
) -> ContextSegments:
    rank, size = parallel.cp_rank, parallel.cp_size
    gathered = np.concatenate([zigzag_index(lens, r, size) for r in range(size)])
    place = np.empty_like(gathered)
    place[gathered] = np.arange(len(gathered))
    q_lens, k_lens, index = [], [], []
    for start, length in zip(np.cumsum(lens) - lens, lens, strict=True):
        chunk = length // (2 * size)
        for end in (chunk * (rank + 1), chunk * (2 * size - rank)):
            q_lens.append(int(chunk))
            k_lens.append(int(end))
            index.append(place[start : start + end])
    return ContextSegments(
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        kv_index=torch.from_numpy(np.concatenate(index)).to(device),
        cu_q=_offsets(q_lens, device),
        cu_k=_offsets(k_lens, device),
        gathered=torch.from_numpy(gathered).to(device),
        place=torch.from_numpy(place).to(device),
    )


def _offsets(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(device=device, dtype=torch.int32)


def uses_te_attention(config: TransformerConfig) -> bool:
    """Return whether --attention-backend selects an attention of TransformerEngine.

    flash is the package flash-attn if it supports the model, otherwise slime's packed attention.
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
