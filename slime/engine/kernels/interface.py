"""The few operations besides matrix products that the fast forward is made of, whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(kw_only=True, eq=False)
class Tokens:
    """The T tokens of a forward: where each stands, and in which row of the page table."""

    ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    rows: torch.Tensor  # [T] int32
    tiles: torch.Tensor | None = None  # [N, 2] int32: first token and count of runs of one request


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
    """The KV cache of one layer, [pages, page_size, heads, dim], and the table of who has which."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor  # [rows, pages per request] int32

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


@dataclass(kw_only=True, eq=False)
class Rotary:
    """Cosines and sines by position, [positions, dim]."""

    cosines: torch.Tensor
    sines: torch.Tensor


@dataclass(kw_only=True, eq=False)
class QueryKeyNorm:
    query: torch.Tensor  # [dim]
    key: torch.Tensor
    eps: float


@dataclass(kw_only=True, eq=False)
class DrawSettings:
    """By row of the page table. A negative temperature -t: the most probable token, log-probs at t."""

    temperatures: torch.Tensor  # [rows] float32
    seeds: torch.Tensor  # [rows] int64
    last_tokens: torch.Tensor  # [rows] int32, filled in by whoever draws


class ExpertKernels(Protocol):
    def route(
        self, logits: torch.Tensor, top: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of logits [T, experts]: the `top` most probable, [T, top] int32, and their weights."""
        ...

    def mix(
        self,
        hidden: torch.Tensor,  # [T, H]
        experts: torch.Tensor,  # [T, top] int32, different ones
        weights: torch.Tensor,  # [T, top]
        gate_up: torch.Tensor,  # [experts, 2 W, H]
        down: torch.Tensor,  # [experts, H, W]
    ) -> torch.Tensor:
        """What its experts make of each token, added up by their weights: [T, H]."""
        ...


class Kernels(Protocol):
    experts: ExpertKernels | None  # None: a mixture runs as Hugging Face defines it

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta`, whole or in parts, to `hidden` in place; the norm of the sum."""
        ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, K] times [N, K]: [T, N]"""
        ...

    def linear_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The same, or parts of it [P, T, N] which `add_rms_norm` adds up."""
        ...

    def gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """silu(gate) * up, where a product with [gate | up, K] gives both"""
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
        """Norm and rotate queries and keys in place; store keys and values in their pages."""
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
        """Each query over its row up to its own position: [T, num_query * dim]."""
        ...

    def draw(
        self,
        logits: torch.Tensor,  # [R, V]
        rows: torch.Tensor,  # [R] int32, of the page table
        positions: torch.Tensor,  # [R] int32, of the token before the one to draw
        settings: DrawSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R] int32, also noted in `last_tokens`, and their log-probs [R] float32."""
        ...
