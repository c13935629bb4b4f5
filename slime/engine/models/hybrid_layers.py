"""Fast-path layers of models with gated delta nets, where they differ from Llama's.

Attention has a gate on its output, and RoPE only on the first part of a head. The kernels rotate dimension
i with i + dim / 2, so the dimensions of queries and keys are permuted such that the rotated ones form these
pairs; scores do not depend on the order::

    Hugging Face   rotated a | rotated b | rest        (dim 256: 32, 32, 192)
    here           rotated a | rest | rotated b | rest
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from slime.algorithms.delta_layers import DeltaInputs, conv_weight, find_delta_nets, heads_of
from slime.engine.kernels.interface import (
    AdapterRows,
    Heads,
    Kernels,
    Pages,
    QueryKeyNorm,
    Rotary,
    Tokens,
)
from slime.engine.kv_cache import KVCache
from slime.engine.models.fused_weights import Projection, register_tensor

if TYPE_CHECKING:
    from slime.engine.lora.bank import LoraBank


@dataclass(kw_only=True, eq=False)
class Forward:
    """What the layers of a forward have in common."""

    tokens: Tokens
    cache: KVCache
    table: torch.Tensor  # the page table
    rotary: Rotary

    def pages(self, layer: int) -> Pages:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return Pages(keys=keys, values=values, table=self.table)


def is_hybrid(model: PreTrainedModel) -> bool:
    return bool(find_delta_nets(model))


def spread_rotary(rotary: Rotary, dim: int) -> Rotary:
    """Return RoPE tables for whole heads in the permuted order; other dimensions are not rotated."""
    half, pairs = dim // 2, rotary.cosines.shape[1] // 2
    positions = len(rotary.cosines)
    cosines, sines = rotary.cosines.new_ones(positions, dim), rotary.sines.new_zeros(positions, dim)
    for whole, part in ((cosines, rotary.cosines), (sines, rotary.sines)):
        whole[:, :pairs] = part[:, :pairs]
        whole[:, half : half + pairs] = part[:, pairs:]
    return Rotary(cosines=cosines, sines=sines)


def _dim_order(dim: int, pairs: int) -> torch.Tensor:
    """Return the permutation: the Hugging Face dimension at each position of a head."""
    rest = list(range(2 * pairs, dim))
    gap = dim // 2 - pairs
    return torch.tensor([*range(pairs), *rest[:gap], *range(pairs, 2 * pairs), *rest[gap:]])


class GatedAttention:
    def __init__(self, attention: Any, kernels: Kernels, lora: LoraBank | None, pairs: int) -> None:
        self.index: int = attention.layer_idx
        self._kernels = kernels
        self._scale: float = attention.scaling
        dim, device = attention.head_dim, attention.q_proj.weight.device
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, _ = (p.out_features // dim for p in projections)
        self.heads = Heads(num_query=query // 2, num_key=key, dim=dim)
        self._fused = Projection(attention, "qkv", projections, kernels, lora)
        self._out = Projection(attention, "out", (attention.o_proj,), kernels, lora, split_k=True)
        order = _dim_order(dim, pairs)
        self._columns = register_tensor(attention, "columns", self._fused_columns(order).to(device))
        # The parameters themselves, in Hugging Face's order and minus one, so that updates apply.
        self._qk_norm = QueryKeyNorm(
            query=attention.q_norm.weight,
            key=attention.k_norm.weight,
            eps=attention.q_norm.eps,
            order=register_tensor(attention, "order", order.to(device)),
        )

    def _fused_columns(self, order: torch.Tensor) -> torch.Tensor:
        """Return the columns of queries, keys and values in the fused matmul."""
        heads, dim = self.heads, self.heads.dim
        # A query and its gate are side by side.
        starts = 2 * dim * torch.arange(heads.num_query)[:, None]
        keys = 2 * dim * heads.num_query + dim * torch.arange(heads.num_key)[:, None]
        values = keys.max() + dim + torch.arange(dim * heads.num_key)
        return torch.cat([(starts + order).flatten(), (keys + order).flatten(), values])

    def __call__(self, normed: torch.Tensor, forward: Forward) -> torch.Tensor:
        kernels, heads, tokens = self._kernels, self.heads, forward.tokens
        pages = forward.pages(self.index)
        fused = self._fused(normed, tokens.adapters)
        qkv = fused.index_select(1, self._columns)
        kernels.rope_store(qkv, tokens, heads, pages, forward.rotary, self._qk_norm)
        attended = kernels.attend(qkv, tokens, heads, pages, self._scale, None)
        attended = kernels.gate_heads(attended, fused, heads.dim)
        return self._out(attended, tokens.adapters)


class DeltaNet:
    def __init__(self, net: Any, kernels: Kernels, lora: LoraBank | None) -> None:
        self.index: int = net.layer_idx
        self._net, self._kernels, self.heads = net, kernels, heads_of(net)
        interleaved = hasattr(net, "in_proj_qkvz")
        names = ("qkvz", "ba") if interleaved else ("qkv", "z", "b", "a")
        projections = tuple(getattr(net, f"in_proj_{name}") for name in names)
        self._fused = Projection(net, "in", projections, kernels, lora)
        self._out = Projection(net, "out", (net.out_proj,), kernels, lora, split_k=True)
        width = net.value_dim
        self._widths = [net.conv_dim, width, net.num_v_heads, net.num_v_heads]  # qkv, z, b, a
        self._columns: torch.Tensor | None = None
        if interleaved:
            columns = _interleaved_columns(net).to(net.out_proj.weight.device)
            self._columns = register_tensor(net, "columns", columns)

    def __call__(self, normed: torch.Tensor, forward: Forward) -> torch.Tensor:
        kernels, net, tokens, cache = self._kernels, self._net, forward.tokens, forward.cache
        fused = self._fused(normed, tokens.adapters)
        if self._columns is not None:
            fused = fused.index_select(1, self._columns)
        qkv, z, b, a = fused.split(self._widths, dim=1)
        decay, beta = kernels.delta_gates(a, b, net.A_log, net.dt_bias)
        inputs = DeltaInputs(mixed_qkv=qkv, decay=decay, beta=beta)
        assert cache.states is not None
        if tokens.states is None:
            weight, rows = conv_weight(net), tokens.rows
            out = kernels.continue_rows(inputs, weight, self.heads, cache.states, self.index, rows)
        else:
            out = tokens.states.run(self.index, inputs, conv_weight(net), self.heads)
        gated = kernels.gated_norm(out, z, net.norm.weight, net.layer_norm_epsilon)
        return self._out(gated, tokens.adapters)


def _interleaved_columns(net: Any) -> torch.Tensor:
    """Return where q, k, v, z, b and a of all heads are in the outputs of Qwen3-Next's two projections.

    Query, key, and the values and z of its value heads are interleaved by key head, and so are b and a.
    """
    repeat = net.num_v_heads // net.num_k_heads
    key, values = net.head_k_dim, repeat * net.head_v_dim
    size, start = 2 * key + 2 * values, net.num_k_heads * (2 * key + 2 * values)
    heads = torch.arange(net.num_k_heads)[:, None]
    firsts = {
        "q": (0, key),
        "k": (key, key),
        "v": (2 * key, values),
        "z": (2 * key + values, values),
    }
    parts = [(heads * size + at + torch.arange(count)).flatten() for at, count in firsts.values()]
    for at in (0, repeat):  # b, then a
        parts.append((start + heads * 2 * repeat + at + torch.arange(repeat)).flatten())
    return torch.cat(parts)


class _Mlp(Protocol):
    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor: ...


class SharedExpertMoe:
    """Routed experts plus a gated shared expert; without MoE kernels the routed ones run as Hugging Face modules."""

    def __init__(
        self, mlp: Any, routed: _Mlp | None, shared: _Mlp, kernels: Kernels, lora: LoraBank | None
    ) -> None:
        self._mlp, self._routed, self._shared = mlp, routed, shared
        self._kernels, self._lora = kernels, lora
        self._gate_lora = None if lora is None else lora.attach((mlp.shared_expert_gate,))
        if lora is not None and routed is None:
            lora.hook_experts(mlp.experts)

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        gate = F.linear(hidden, self._mlp.shared_expert_gate.weight)  # [T, 1]
        if adapters is not None and self._gate_lora is not None:
            self._kernels.add_lora(gate, hidden, self._gate_lora, adapters)
        shared = self._shared(hidden, adapters)
        return self._kernels.add_gated(self._run_experts(hidden, adapters), gate, shared)

    def _run_experts(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        if self._routed is not None:
            return self._routed(hidden, adapters)
        if self._lora is not None:
            self._lora.rows = adapters
        _, weights, experts = self._mlp.gate(hidden)
        return self._mlp.experts(hidden, experts, weights)
