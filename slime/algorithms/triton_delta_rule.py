"""The gated delta rule over packed samples in Triton, forward and backward, in chunks of 64 tokens.

Within a chunk, c is the running sum of log decays, l its last value, and <= and < mask [64, 64] matrices:

    A   = beta_i exp(c_i - c_j) k_i.k_j   (j < i)        X = (1 + A)^-1
    U   = X (beta v)        W = X (beta exp(c) k)
    D   = U - W S                                         what the chunk writes to the state S
    O   = exp(c) q S + M D,   M = exp(c_i - c_j) q_i.k_j   (j <= i)
    S'  = exp(l) S + (exp(l - c) k)^T D                   the state of the next chunk

Only S is passed from chunk to chunk, and its gradient in reverse; all else is computed for all chunks in
parallel. The backward pass recomputes U, W, X, S and D from the inputs. With P = X^T dD and R = X^T dW
the gradient of A is -(P U^T + R W^T), so no gradient of the inverse is needed.

Every kernel has two warps: from four on, Triton uses asynchronous matmuls on Hopper GPUs, and ptxas before
CUDA 13.3 reuses their input registers too early (wrong gradients: triton-lang/triton#11781). Matrices
that are needed transposed are computed from transposed inputs.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from slime.algorithms import triton_delta_kernels as kernels

CHUNK = 64
_STATE_COLUMNS = 32  # of S per program of the two scans


@dataclass(frozen=True, kw_only=True, eq=False)
class Borders:
    """Boundaries of packed samples and their chunks, on the device.

    Samples of 70 and 130 tokens::

        starts       = [0, 70, 200]
        chunks       = [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]     sample, number within it
        first_chunks = [0, 2, 5]
        positions    = [0..69, 0..129]                              of tokens within their samples
    """

    starts: torch.Tensor
    chunks: torch.Tensor
    first_chunks: torch.Tensor
    positions: torch.Tensor  # int32


@lru_cache(maxsize=16)  # all layers and passes of a micro-batch share one
@torch.inference_mode(False)  # an engine's may be reused by a trainer, whose backward saves it
def make_borders(lens: tuple[int, ...], device: torch.device) -> Borders:
    counts = [-(-length // CHUNK) for length in lens]
    chunks = [(n, i) for n, count in enumerate(counts) for i in range(count)]
    return Borders(
        starts=torch.tensor([0, *accumulate(lens)], device=device),
        chunks=torch.tensor(chunks, device=device),
        first_chunks=torch.tensor([0, *accumulate(counts)], device=device),
        positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lens]).to(device),
    )


def delta_rule(
    query: torch.Tensor,  # [T, key heads, key dim], normalized and scaled
    key: torch.Tensor,  # [T, key heads, key dim], normalized
    value: torch.Tensor,  # [T, value heads, value dim]
    decay: torch.Tensor,  # [T, value heads], log
    beta: torch.Tensor,  # [T, value heads]
    borders: Borders,
    states: torch.Tensor | None = None,  # [N, value heads, key dim, value dim], None: zeros
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return [T, value heads, value dim], and if states were given, the final states in fp32.

    The first five arguments get gradients. States are only for passes without gradients.
    """
    inputs = (query, key, value, decay.float(), beta)
    if states is None:
        return _DeltaRule.apply(*inputs, borders), None  # type: ignore[return-value]
    assert not any(x.requires_grad for x in inputs), "states have no gradient"
    last = torch.empty_like(states, dtype=torch.float32, memory_format=torch.contiguous_format)
    call = _Call(tuple(x.contiguous() for x in inputs), borders)
    call.scan(states.float().contiguous(), last)
    return call.output(), last


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *inputs, borders = args
        inputs = tuple(x.contiguous() for x in inputs)
        ctx.save_for_backward(*inputs)
        ctx.borders = borders
        call = _Call(inputs, borders)
        call.scan()
        return call.output()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = _Call(ctx.saved_tensors, ctx.borders)
        call.scan()
        return *call.gradients(grad.contiguous()), None


class _Call:
    """The kernel launches for one batch, and their intermediate tensors."""

    def __init__(self, inputs: tuple[torch.Tensor, ...], borders: Borders):
        self.query, self.key, self.value, self.decay, self.beta = inputs
        self.borders = borders
        tokens, key_heads, key_dim = self.key.shape
        _, heads, value_dim = self.value.shape
        self.heads, self.num_chunks = heads, len(borders.chunks)
        sizes = {
            "KEY_HEADS": key_heads,
            "HEADS": heads,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "CHUNK": CHUNK,
            "num_warps": 2,
            "num_stages": 2,
        }
        wide = _power_of_2(key_dim)
        columns = _power_of_2(value_dim)
        self.options = {**sizes, "KEY_BLOCK": min(64, wide), "VALUE_BLOCK": min(64, columns)}
        scan_columns = min(_STATE_COLUMNS, columns)
        self.scan_options = {**sizes, "KEY_BLOCK": wide, "VALUE_BLOCK": scan_columns}
        self.sums = torch.empty_like(self.decay)  # c
        self.inverse = self.value.new_empty(tokens, heads, CHUNK)  # X
        self.u = torch.empty_like(self.value)
        self.w = self.value.new_empty(tokens, heads, key_dim)
        self.written = torch.empty_like(self.value)  # D
        self.states = self.value.new_empty(self.num_chunks, heads, key_dim, value_dim)

    def scan(self, first: torch.Tensor | None = None, last: torch.Tensor | None = None) -> None:
        """Compute the state before every chunk and D; write the final states to `last`."""
        borders = self.borders
        kernels.prepare_kernel[(self.num_chunks, self.heads)](
            *(self.key, self.value, self.decay, self.beta, borders.starts, borders.chunks),
            *(self.sums, self.inverse, self.u, self.w),
            **self.options,
        )
        kernels.state_kernel[self._scan_grid()](
            *(self.key, self.sums, self.u, self.w, borders.starts, borders.first_chunks),
            *(first, last, self.states, self.written),
            HAS_ENDS=first is not None,
            **self.scan_options,
        )

    def output(self) -> torch.Tensor:
        out = torch.empty_like(self.value)
        kernels.output_kernel[(self.num_chunks, self.heads)](
            *(self.query, self.key, self.sums, self.states, self.written),
            *(self.borders.starts, self.borders.chunks, out),
            **self.options,
        )
        return out

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key, value, decay and beta."""
        borders, grid = self.borders, (self.num_chunks, self.heads)
        where = (borders.starts, borders.chunks)
        within, d_written = torch.empty_like(grad), torch.empty_like(grad)
        d_states = torch.empty_like(self.states)
        kernels.within_kernel[grid](
            *(self.query, self.key, self.sums, grad, *where, within), **self.options
        )
        kernels.state_backward_kernel[self._scan_grid()](
            *(self.query, self.key, self.sums, self.w, grad, within),
            *(borders.starts, borders.first_chunks, d_states, d_written),
            **self.scan_options,
        )
        p, r = torch.empty_like(self.u), torch.empty_like(self.w)
        d_query, d_key = torch.empty_like(self.w), torch.empty_like(self.w)  # per value head
        d_value, d_beta = torch.empty_like(self.value), torch.empty_like(self.beta)
        d_sums, d_decay = torch.empty_like(self.sums), torch.empty_like(self.decay)
        kernels.solve_backward_kernel[grid](
            *(self.inverse, self.states, d_written, *where, p, r), **self.options
        )
        kernels.query_backward_kernel[grid](
            *(self.query, self.key, self.sums, self.states, self.written, grad),
            *(*where, d_query, d_sums),
            **self.options,
        )
        kernels.key_backward_kernel[grid](
            *(self.query, self.key, self.value, self.beta, self.sums, self.u, self.w, p, r),
            *(self.states, self.written, d_states, grad, d_sums, *where),
            *(d_key, d_value, d_beta, d_decay),
            **self.options,
        )
        shape = (len(self.key), self.key.shape[1], -1, self.key.shape[2])
        return *(x.view(shape).sum(2) for x in (d_query, d_key)), d_value, d_decay, d_beta

    def _scan_grid(self) -> tuple[int, int]:
        columns = -(-self.value.shape[2] // self.scan_options["VALUE_BLOCK"])
        return (len(self.borders.starts) - 1) * self.heads, columns


def _power_of_2(dim: int) -> int:
    """Return the block size for a dimension: a power of 2, at least 16 for tensor cores."""
    return max(16, 1 << (dim - 1).bit_length())
