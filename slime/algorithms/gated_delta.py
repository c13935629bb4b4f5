"""Gated delta net over packed samples in plain torch: causal convolution, then the gated delta rule.

The rule reads and writes one matrix S per head, which starts at zero in every sample:

    S_t = exp(g_t) S_{t-1} + k_t d_t^T,   d_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t),   o_t = S_t^T q_t

It is computed in chunks of 64 tokens (Yang et al., "Gated Delta Networks", 2024). Within a chunk the
d_t solve a triangular system; between chunks only S is passed on. Chunks start at the first token of
a sample and hold only tokens of that sample, so a sample's result does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_CHUNK = 64
NORM_EPS = 1e-6


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
        order   = [1, 0]
        gather  = [70..133, 0..63, 134..197, 64..69 69..69, 198..199 199..199]
        real    = false at padding, which repeats the last token
        scatter = position among all chunks of each packed token
    """

    counts: tuple[int, ...]
    gather: torch.Tensor  # [chunks * 64]
    real: torch.Tensor  # [chunks, 64]
    scatter: torch.Tensor  # [T]
    sample: torch.Tensor  # [T] index of each token's sample
    order: torch.Tensor  # [N] the samples, longest first
    ends: torch.Tensor  # [N] tokens up to the end of each sample


def gated_delta_net(
    mixed_qkv: torch.Tensor,  # [T, sum of heads.widths], before the convolution
    conv_weight: torch.Tensor,  # [sum of heads.widths, kernel size]
    decay: torch.Tensor,  # [T, value heads], log of the factor of S, <= 0
    beta: torch.Tensor,  # [T, value heads]
    heads: DeltaHeads,
    lens: tuple[int, ...],
) -> torch.Tensor:
    """Return [T, value heads, value dim] for packed samples of these lengths.

    The backward pass recomputes everything from the inputs: intermediate results need about twenty
    times their memory.
    """
    args = (mixed_qkv, conv_weight, decay, beta, heads, lens)
    if not torch.is_grad_enabled():
        return run_torch(*args)[0]
    return checkpoint(run_torch, *args, use_reentrant=False, preserve_rng_state=False)[0]


def run_torch(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    heads: DeltaHeads,
    lens: tuple[int, ...],
    windows: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `DeltaNetKernels` in plain torch; windows and matrices start at zero if they are None."""
    layout = chunk_layout(lens, mixed_qkv.device)
    mixed, windows = continue_conv(mixed_qkv, conv_weight, layout, windows)
    query, key, value = split_heads(F.silu(mixed), heads)
    out, matrices = continue_delta_rule(query, key, value, decay, beta, layout, matrices)
    return out, windows, matrices


def continue_conv(
    x: torch.Tensor,  # [T, C]
    weight: torch.Tensor,  # [C, K]
    layout: ChunkLayout,
    windows: torch.Tensor | None = None,  # [N, K - 1, C], None: zeros
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve samples that continue after these windows; return [T, C] and the windows at the end.

    A window is the last K - 1 inputs of a sample; it is inserted before the sample's tokens.
    """
    before, count = weight.shape[1] - 1, len(layout.ends)
    index = torch.arange(len(x), device=x.device) + before * layout.sample  # of the first factor
    window = torch.arange(before, device=x.device)
    starts = F.pad(layout.ends[:-1], (1, 0))
    firsts, lasts = (
        (at + before * torch.arange(count, device=x.device))[:, None] + window
        for at in (starts, layout.ends)
    )
    spaced = x.new_zeros(len(x) + before * count, x.shape[1]).index_copy(0, index + before, x)
    if windows is not None:
        spaced = spaced.index_copy(0, firsts.flatten(), windows.flatten(0, 1))
    out = F.conv1d(spaced.t().unsqueeze(0), weight.unsqueeze(1), groups=len(weight))
    return out.squeeze(0).t().index_select(0, index), spaced[lasts]


def continue_delta_rule(
    query: torch.Tensor,  # [T, key heads, key dim]
    key: torch.Tensor,
    value: torch.Tensor,  # [T, value heads, value dim]
    decay: torch.Tensor,  # [T, value heads], log
    beta: torch.Tensor,  # [T, value heads]
    layout: ChunkLayout,
    states: torch.Tensor | None = None,  # [N, value heads, key dim, value dim], None: zeros
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of samples that start with these states, and their states at the end.

    The output has the dtype of `value`; it is computed in at least fp32. Queries and keys are normalized
    to length 1, and queries scaled by 1 / sqrt(key dim).
    """
    count, repeats = value.shape[1], value.shape[1] // key.shape[1]
    query = normalized(query) * query.shape[-1] ** -0.5
    q, k = (_chunks(x.unsqueeze(2), layout) for x in (query, normalized(key)))
    per_value = (value, decay.unsqueeze(-1), beta.unsqueeze(-1))
    v, g, b = (_chunks(_wide(x).unflatten(1, (-1, repeats)), layout) for x in per_value)
    real = layout.real[:, None, None, :, None]
    b = b * real  # padding neither writes to S nor decays it
    cum = (g * real).cumsum(-2)
    difference = cum - cum.transpose(-2, -1)
    causal = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).tril()
    pairwise = difference.masked_fill(~causal, float("-inf")).exp()
    # q and k [n, key heads, 1, 64, D] serve all value heads of a key head, the other dimension.
    system = k @ k.transpose(-2, -1) * (pairwise * b)
    right = torch.cat([v * b, k * (b * cum.exp())], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    parts = (
        *solved.split([v.shape[-1], k.shape[-1]], dim=-1),
        q @ k.transpose(-2, -1) * pairwise,
        q * cum.exp(),
        k * (cum[..., -1:, :] - cum).exp(),
        cum[..., -1:, :].exp(),
    )
    parts = [part.flatten(1, 2) for part in parts]  # [n, value heads, ...]
    if states is None:
        states = v.new_zeros(layout.counts[0], count, k.shape[-1], v.shape[-1])
    else:
        states = states.index_select(0, layout.order)
    out, states = _scan(states, *(part.split(layout.counts) for part in parts))
    flat = out.transpose(1, 2).flatten(0, 1)
    back = layout.order.argsort()
    return flat.index_select(0, layout.scatter).to(value.dtype), states.index_select(0, back)


# All layers and passes of a micro-batch share one layout. One created by an engine may be reused by a
# trainer, whose backward pass cannot save tensors created in inference mode.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
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
        order=torch.tensor(order).to(device),
        ends=torch.tensor(starts[1:]).to(device),
    )


def split_heads(
    mixed: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [T, heads, dim] of the output of the convolution."""
    query, key, value = mixed.split(heads.widths, dim=1)
    query, key = (x.unflatten(1, (heads.num_key, heads.key_dim)) for x in (query, key))
    return query, key, value.unflatten(1, (heads.num_value, heads.value_dim))


def _scan(
    state: torch.Tensor,  # [N, H, key dim, value dim], in the order of the chunks
    written: tuple[torch.Tensor, ...],  # one tensor per chunk number
    read: tuple[torch.Tensor, ...],
    attention: tuple[torch.Tensor, ...],
    query: tuple[torch.Tensor, ...],
    key: tuple[torch.Tensor, ...],
    decay: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass S from chunk to chunk of all samples at once; samples that have ended drop out."""
    outs, ended = [], []
    for w, r, attn, q, k, factor in zip(written, read, attention, query, key, decay, strict=True):
        ended.append(state[len(w) :])
        state = state[: len(w)]
        new = w - r @ state
        outs.append(q @ state + attn @ new)
        state = state * factor + k.transpose(2, 3) @ new
    return torch.cat(outs), torch.cat([state, *reversed(ended)])


def _chunks(x: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    """Return [chunks, ..., 64, D] of packed x [T, ..., D], contiguous so that matmuls need not copy it."""
    chunks = x.index_select(0, layout.gather).unflatten(0, (-1, _CHUNK))
    return chunks.movedim(1, -2).contiguous()


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Return x in at least fp32 with rows of length 1."""
    wide = _wide(x)
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + NORM_EPS)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
