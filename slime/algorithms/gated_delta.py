"""Gated delta net over packed samples in plain torch: causal convolution, then the gated delta rule.

The rule reads and writes one matrix S per head, which starts at zero in every sample:

    S_t = exp(g_t) S_{t-1} + k_t d_t^T,   d_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t),   o_t = S_t^T q_t

It is computed in chunks of 64 tokens (Yang et al., "Gated Delta Networks", 2024). Within a chunk the
d_t solve a triangular system; between chunks only S is passed on. Chunks start at the first token of
a sample and hold tokens of that sample alone, so a sample's result does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_CHUNK = 64
_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DeltaHeads:
    """Sizes of a gated delta net; each key head serves `num_value // num_key` value heads."""

    num_key: int
    num_value: int
    key_dim: int
    value_dim: int

    @property
    def widths(self) -> list[int]:
        """Columns of queries, keys and values in the input of the convolution."""
        return [self.num_key * self.key_dim] * 2 + [self.num_value * self.value_dim]


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Chunks of packed samples, ordered by their number within the sample, longest samples first.

    Samples of 70 and 130 tokens have 2 and 3 chunks; the second sample comes first::

        counts  = (2, 2, 1)     chunks with number 0, 1 and 2: a prefix of the samples each
        gather  = [70..133, 0..63, 134..197, 64..69 69..69, 198..199 199..199]
        real    = false where a position behind the last token repeats it
        scatter = position among all chunks of each packed token
    """

    counts: tuple[int, ...]
    gather: torch.Tensor  # [chunks * 64]
    real: torch.Tensor  # [chunks, 64]
    scatter: torch.Tensor  # [T]
    sample: torch.Tensor  # [T] index of each token's sample


def gated_delta_net(
    mixed_qkv: torch.Tensor,  # [T, sum of heads.widths], before the convolution
    conv_weight: torch.Tensor,  # [sum of heads.widths, kernel size]
    decay: torch.Tensor,  # [T, value heads], log of the factor of S, <= 0
    beta: torch.Tensor,  # [T, value heads]
    heads: DeltaHeads,
    lens: tuple[int, ...],
) -> torch.Tensor:
    """Return [T, value heads, value dim] for packed samples of these lengths.

    The backward pass computes everything again from the inputs: intermediate results take about
    twenty times their memory.
    """
    layout = chunk_layout(lens, mixed_qkv.device)
    args = (mixed_qkv, conv_weight, decay, beta, heads, layout)
    if not torch.is_grad_enabled():
        return _net(*args)
    return checkpoint(_net, *args, use_reentrant=False, preserve_rng_state=False)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    """Convolve each column of x [T, C] with its row of weight [C, K], within each sample.

    Zeros are inserted before every sample, one less than the size of the kernel.
    """
    before = weight.shape[1] - 1
    index = torch.arange(len(x), device=x.device) + before * layout.sample  # of the first factor
    rows = len(x) + before * layout.counts[0]
    spaced = x.new_zeros(rows, x.shape[1]).index_copy(0, index + before, x)
    out = F.conv1d(spaced.t().unsqueeze(0), weight.unsqueeze(1), groups=len(weight))
    return out.squeeze(0).t().index_select(0, index)


def gated_delta_rule(
    query: torch.Tensor,  # [T, key heads, key dim]
    key: torch.Tensor,
    value: torch.Tensor,  # [T, value heads, value dim]
    decay: torch.Tensor,  # [T, value heads], log
    beta: torch.Tensor,  # [T, value heads]
    layout: ChunkLayout,
) -> torch.Tensor:
    """Return [T, value heads, value dim] in the dtype of `value`, computed in at least fp32.

    Queries and keys are normalized to length 1, and queries scaled by 1 / sqrt(key dim).
    """
    repeats = value.shape[1] // key.shape[1]
    query = _normalized(query) * query.shape[-1] ** -0.5
    q, k = (_chunks(x.repeat_interleave(repeats, 1), layout) for x in (query, _normalized(key)))
    v, g, b = (_chunks(_wide(x), layout) for x in (value, decay.unsqueeze(-1), beta.unsqueeze(-1)))
    real = layout.real[:, None, :, None]
    b = b * real  # padding neither writes to S nor decays it
    cum = (g * real).cumsum(2)  # [n, H, 64, 1]
    difference = cum - cum.transpose(2, 3)
    causal = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    pairwise = difference.masked_fill(~causal, float("-inf")).exp()
    system = (k * b) @ k.transpose(2, 3) * pairwise
    solve = torch.linalg.solve_triangular
    written = solve(system, v * b, upper=False, unitriangular=True)
    read = solve(system, k * b * cum.exp(), upper=False, unitriangular=True)
    parts = (
        written,
        read,
        q @ k.transpose(2, 3) * pairwise,
        q * cum.exp(),
        k * (cum[:, :, -1:] - cum).exp(),
        cum[:, :, -1:].exp(),
    )
    out = _scan(*(part.split(layout.counts) for part in parts))  # [n, H, 64, value dim]
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, layout.scatter).to(value.dtype)


@lru_cache(maxsize=16)  # all layers and passes of a micro-batch share one
def chunk_layout(lens: tuple[int, ...], device: torch.device) -> ChunkLayout:
    """Return the chunks of packed samples of these lengths."""
    chunks = [-(-length // _CHUNK) for length in lens]
    starts = [0, *accumulate(lens)]
    order = sorted(range(len(lens)), key=lambda sample: -chunks[sample])
    counts = [sum(count > step for count in chunks) for step in range(max(chunks))]
    firsts, lasts = [], []  # first token of each chunk, last token of its sample
    for step, count in enumerate(counts):
        firsts += [starts[sample] + step * _CHUNK for sample in order[:count]]
        lasts += [starts[sample + 1] - 1 for sample in order[:count]]
    positions = torch.tensor(firsts)[:, None] + torch.arange(_CHUNK)
    last = torch.tensor(lasts)[:, None]
    real, gather = positions <= last, positions.minimum(last).flatten()
    scatter = torch.empty(starts[-1], dtype=torch.long)
    where = real.flatten().nonzero().squeeze(1)
    scatter[gather[where]] = where
    sample = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))
    return ChunkLayout(
        counts=tuple(counts),
        gather=gather.to(device),
        real=real.to(device),
        scatter=scatter.to(device),
        sample=sample.to(device),
    )


def _net(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    heads: DeltaHeads,
    layout: ChunkLayout,
) -> torch.Tensor:
    mixed = F.silu(causal_conv(mixed_qkv, conv_weight, layout))
    query, key, value = mixed.split(heads.widths, dim=1)
    query, key = (x.unflatten(1, (heads.num_key, heads.key_dim)) for x in (query, key))
    value = value.unflatten(1, (heads.num_value, heads.value_dim))
    return gated_delta_rule(query, key, value, decay, beta, layout)


def _scan(
    written: tuple[torch.Tensor, ...],  # one tensor per chunk number
    read: tuple[torch.Tensor, ...],
    attention: tuple[torch.Tensor, ...],
    query: tuple[torch.Tensor, ...],
    key: tuple[torch.Tensor, ...],
    decay: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Pass S from chunk to chunk of all samples at once; samples that have ended drop out."""
    keys, values = key[0].shape[-1], written[0].shape[-1]
    state = written[0].new_zeros(*written[0].shape[:2], keys, values)
    outs = []
    for w, r, attn, q, k, factor in zip(written, read, attention, query, key, decay, strict=True):
        state = state[: len(w)]
        new = w - r @ state
        outs.append(q @ state + attn @ new)
        state = state * factor + k.transpose(2, 3) @ new
    return torch.cat(outs)


def _chunks(x: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    """Return [chunks, heads, 64, D] of packed x [T, heads, D]."""
    return x.index_select(0, layout.gather).unflatten(0, (-1, _CHUNK)).transpose(1, 2)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + _NORM_EPS)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
