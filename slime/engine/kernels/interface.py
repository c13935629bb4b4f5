"""The operations of the fast forward, implemented by CpuKernels (C) and CudaKernels (Triton)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from slime.algorithms.delta_layers import DeltaInputs
from slime.algorithms.gated_delta import DeltaHeads
from slime.engine.kv_cache import StateCache

if TYPE_CHECKING:
    from slime.engine.models.delta_net import StatePlan


@dataclass(kw_only=True, eq=False)
class Tokens:
    """The T tokens of a forward, with the position of each in its sequence and its row of the page table."""

    ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    rows: torch.Tensor  # [T] int32
    tiles: torch.Tensor | None = None  # [N, 2] int32: first token and count of runs of one request
    adapters: AdapterRows | None = None  # None: base model only
    # How recurrent layers group the tokens. None (in CUDA graphs): tokens of a row are contiguous, and
    # `continue_rows` finds the groups itself.
    states: StatePlan | None = None
    angles: torch.Tensor | None = None  # [T] int32: rows of the RoPE table; None: `positions`
    rope: torch.Tensor | None = None  # [T, 3] int64, RoPE positions of a forward with images
    images: ImageInputs | None = None


@dataclass(kw_only=True, eq=False)
class ImageInputs:
    """Embeddings of the I image tokens of a forward, and DeepStack features to add after the first layers."""

    at: torch.Tensor  # [I] int64, their indices among the tokens
    embeddings: torch.Tensor  # [I, H]
    deepstack: list[torch.Tensor]  # [I, H] for each of the first layers


@dataclass(kw_only=True, eq=False)
class AdapterRows:
    """The adapter of each token of a forward.

    Three tokens, the last two with the adapter in slot 4::

        slots = [-1, 4, 4]   groups = [(4, [1, 2])]
    """

    slots: torch.Tensor  # [T] int32, -1: base model only
    groups: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # for plain torch
    fixed: bool = False  # matmuls over all tokens, whatever the groups


Affine = tuple[torch.Tensor, torch.Tensor | None]  # weight [N, K] and bias [N]


@dataclass(kw_only=True, eq=False)
class LoraWeights:
    """S slots of adapters of rank up to R for n linears that share an input; see lora/bank.py."""

    a: torch.Tensor  # [S, n * R, in]
    b: torch.Tensor  # [S, out, R]; on a CPU stored as [S, R, out]
    widths: tuple[int, ...]  # output columns of each of the n linears
    scales: torch.Tensor  # [S] float32
    ranks: np.ndarray  # [S, n] int32, 0 where an adapter has nothing
    joined: Affine | None = None  # the base's weight with `a` below it; None if they are separate


@dataclass(kw_only=True, eq=False)
class ExpertLora:
    """S slots of adapters of rank up to R for one parameter with all E experts of a layer."""

    a: torch.Tensor  # [S, E, R, in]
    b: torch.Tensor  # [S, E, out, R]
    scales: torch.Tensor  # [S] float32
    ranks: np.ndarray  # [S] int32, 0 where an adapter has nothing


@dataclass(kw_only=True, eq=False)
class LayerLora:
    """The adapters of the experts of one layer; None for a parameter without adapters."""

    gate_up: ExpertLora | None
    down: ExpertLora | None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of an attention layer."""

    num_query: int
    num_key: int
    dim: int

    @property
    def width(self) -> int:
        return (self.num_query + 2 * self.num_key) * self.dim


@dataclass(kw_only=True, eq=False)
class Pages:
    """The KV cache of one layer, [pages, page_size, heads, dim], and the page table."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor  # [rows, pages per request] int32

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@dataclass(kw_only=True, eq=False)
class Rotary:
    """RoPE: cosines and sines by position, [positions, dim]."""

    cosines: torch.Tensor
    sines: torch.Tensor


@dataclass(kw_only=True, eq=False)
class QueryKeyNorm:
    query: torch.Tensor  # [dim]
    key: torch.Tensor
    eps: float
    # Index of the weight of each dimension of a head; such weights are stored minus one.
    order: torch.Tensor | None = None

    def plain(self) -> QueryKeyNorm:
        """Return the norm with weights in the order of the dimensions, not minus one."""
        if self.order is None:
            return self
        weights = (weight.float()[self.order] + 1.0 for weight in (self.query, self.key))
        query, key = weights
        return QueryKeyNorm(query=query, key=key, eps=self.eps)


@dataclass(kw_only=True, eq=False)
class SamplingState:
    """Sampling parameters by row of the page table. Temperature -t: greedy, with log-probs at t."""

    temperatures: torch.Tensor  # [rows] float32
    seeds: torch.Tensor  # [rows] int64
    last_tokens: torch.Tensor  # [rows] int32, written by `sample`


class MoeKernels(Protocol):
    def route(
        self, logits: torch.Tensor, top: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the top-k experts of router logits [T, experts], [T, top] int32, and their weights."""
        ...

    def run_experts(
        self,
        hidden: torch.Tensor,  # [T, H]
        experts: torch.Tensor,  # [T, top] int32, different ones
        weights: torch.Tensor,  # [T, top]
        gate_up: torch.Tensor,  # [experts, 2 W, H]
        down: torch.Tensor,  # [experts, H, W]
        lora: LayerLora | None = None,
        rows: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's expert outputs, [T, H], with adapters if both are given."""
        ...


class Kernels(Protocol):
    experts: MoeKernels | None  # None: MoE layers run as Hugging Face modules
    joins_adapters: bool  # `linear_lora` takes A below the base's weight, see `LoraWeights.joined`

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        zero_centred: bool = False,
    ) -> torch.Tensor:
        """Add `delta` [T, H], or split-K partial sums [P, T, H], to `hidden` in place; return RMSNorm of it.

        A zero-centred weight is stored minus one.
        """
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the matmul of x [T, K] with weight [N, K] transposed, [T, N]."""
        ...

    def linear_split_k(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Like `linear`, but may return split-K partial sums [P, T, N] for `add_rms_norm` to add up."""
        ...

    def gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return silu(gate) * up, where `weight` [2 N, K] holds gate above up."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of gate_up [T, 2 N]: what `gated_linear` does after its matmul."""
        ...

    def add_lora(
        self, out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows
    ) -> None:
        """Add the adapters of x [T, in] to `out`, [T, out] or split-K partial sums, in place.

        Rows without an adapter keep their bits.
        """
        ...

    def linear_lora(
        self, x: torch.Tensor, base: Affine, lora: LoraWeights, rows: AdapterRows, split_k: bool
    ) -> torch.Tensor:
        """Return `linear` of x, or with `split_k` what `linear_split_k` may return, with adapters added."""
        ...

    def gated_linear_lora(
        self, x: torch.Tensor, base: Affine, lora: LoraWeights, rows: AdapterRows
    ) -> torch.Tensor:
        """Return `gated_linear` of x with the adapters of gate and up added before the activation."""
        ...

    def rope_store(
        self,
        qkv: torch.Tensor,  # [T, width]
        tokens: Tokens,
        heads: Heads,
        pages: Pages,
        rotary: Rotary,
        norm: QueryKeyNorm | None,
    ) -> None:
        """Apply QK norm and RoPE to queries and keys in place; store keys and values in their pages.

        The row of the RoPE table is `tokens.angles` if given, else the position.
        """
        ...

    def attend(
        self,
        qkv: torch.Tensor,
        tokens: Tokens,
        heads: Heads,
        pages: Pages,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return causal attention of each query over its row of the page table: [T, num_query * dim]."""
        ...

    def gate_heads(self, x: torch.Tensor, gates: torch.Tensor, dim: int) -> torch.Tensor:
        """Return x [T, heads * dim] * sigmoid(gate); in `gates` the gate of each head follows dim other columns."""
        ...

    def add_gated(self, x: torch.Tensor, gate: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """Return x [T, H] + sigmoid(gate [T, 1]) * parts, [T, H] or split-K partial sums."""
        ...

    def delta_gates(
        self, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return decay [T, value heads] in fp32 and beta of a gated delta net."""
        ...

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Return RMSNorm of each head of x [T, heads, dim] times silu(gate [T, heads * dim])."""
        ...

    def continue_rows(
        self,
        inputs: DeltaInputs,
        weight: torch.Tensor,  # [C, K] of the convolution
        heads: DeltaHeads,
        states: StateCache,
        layer: int,
        rows: torch.Tensor,  # [T] int32
    ) -> torch.Tensor:
        """Continue the gated delta net of each token's row, in place: [T, value heads, value dim]."""
        ...

    def sample(
        self,
        logits: torch.Tensor,  # [R, V]
        rows: torch.Tensor,  # [R] int32, of the page table
        positions: torch.Tensor,  # [R] int32, of the token before the one to sample
        state: SamplingState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [R] int32, also written to `last_tokens`, and their log-probs [R] float32."""
        ...
