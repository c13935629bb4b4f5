"""Launches the Triton kernels: shapes become grids and block sizes. Importing it requires Triton."""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton types launch arguments as `constexpr`, but callers pass numbers.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
import triton

from slime.engine.kernels import (
    triton_attention,
    triton_delta,
    triton_elementwise,
    triton_lora,
    triton_matmuls,
    triton_sampling,
)
from slime.engine.kernels.interface import (
    AdapterRows,
    Affine,
    Heads,
    LoraWeights,
    MoeKernels,
    Pages,
    QueryKeyNorm,
    Rotary,
    SamplingState,
    Tokens,
)
from slime.engine.kernels.triton_experts import CudaExperts
from slime.engine.kernels.triton_launch import dot_precision, pdl_options, shared_memory

_LOG2E = math.log2(math.e)
_PROGRAMS = 1024  # of a decode attention launch: several per SM
_MAX_SPLITS = 32
_VOCAB_BLOCK = 1024  # vocabulary entries per block
_BLOCKS_PER_PROGRAM = 4
TILE = 64  # queries per program of prefill attention


class CudaKernels:
    experts: MoeKernels | None = CudaExperts()
    joins_adapters = True

    linear = staticmethod(triton_matmuls.linear)
    linear_split_k = staticmethod(triton_matmuls.linear_split_k)
    add_lora = staticmethod(triton_lora.add_lora)
    gate_heads = staticmethod(triton_elementwise.gate_heads)
    add_gated = staticmethod(triton_elementwise.add_gated)
    delta_gates = staticmethod(triton_delta.delta_gates)
    gated_norm = staticmethod(triton_delta.gated_norm)
    continue_rows = staticmethod(triton_delta.continue_rows)

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        zero_centred: bool = False,
    ) -> torch.Tensor:
        out = torch.empty_like(hidden)
        tokens, size = hidden.shape
        block = triton.next_power_of_2(size)
        triton_elementwise.add_rms_norm_kernel[(tokens,)](
            hidden,
            hidden if delta is None else delta,
            weight,
            out,
            eps,
            tokens,
            SIZE=size,
            BLOCK=block,
            SPLIT_K=0 if delta is None else delta.numel() // hidden.numel(),
            ZERO_CENTRED=zero_centred,
            num_warps=_warps(block // 256),
            **pdl_options(),
        )
        return out

    def gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = triton_matmuls.gated_linear(x, weight) if bias is None else None
        return self.silu_mul(F.linear(x, weight, bias)) if out is None else out

    def linear_lora(
        self, x: torch.Tensor, base: Affine, lora: LoraWeights, rows: AdapterRows, split_k: bool
    ) -> torch.Tensor:
        if lora.joined is not None:
            return triton_lora.linear_lora(x, lora, rows)
        out = (self.linear_split_k if split_k else self.linear)(x, *base)
        triton_lora.add_lora(out, x, lora, rows)
        return out

    def gated_linear_lora(
        self, x: torch.Tensor, base: Affine, lora: LoraWeights, rows: AdapterRows
    ) -> torch.Tensor:
        if lora.joined is not None:
            return triton_lora.gated_linear_lora(x, lora, rows)
        return triton_lora.silu_mul_lora(self.linear(x, *base), x, lora, rows)

    def rope_store(
        self,
        qkv: torch.Tensor,
        tokens: Tokens,
        heads: Heads,
        pages: Pages,
        rotary: Rotary,
        norm: QueryKeyNorm | None,
    ) -> None:
        heads_block = triton.next_power_of_2(heads.num_query + heads.num_key)
        triton_elementwise.rope_store_kernel[(qkv.shape[0],)](
            qkv,
            tokens.rows,
            tokens.positions,
            tokens.positions if tokens.angles is None else tokens.angles,
            pages.table,
            pages.keys,
            pages.values,
            rotary.cosines,
            rotary.sines,
            qkv if norm is None else norm.query,
            qkv if norm is None else norm.key,
            qkv if norm is None or norm.order is None else norm.order,
            0.0 if norm is None else norm.eps,
            pages.table.shape[1],
            QUERY_HEADS=heads.num_query,
            KEY_HEADS=heads.num_key,
            HEADS_BLOCK=heads_block,
            VALUE_BLOCK=triton.next_power_of_2(heads.num_key * heads.dim),
            DIM=heads.dim,
            HALF_BLOCK=triton.next_power_of_2(heads.dim // 2),
            PAGE=pages.page_size,
            NORM=norm is not None,
            ORDERED=norm is not None and norm.order is not None,
            num_warps=_warps(heads_block * heads.dim // 512),
            **pdl_options(),
        )

    def attend(
        self,
        qkv: torch.Tensor,
        tokens: Tokens,
        heads: Heads,
        pages: Pages,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        count, group = qkv.shape[0], heads.num_query // heads.num_key
        dim_block = max(16, triton.next_power_of_2(heads.dim))
        out = qkv.new_empty(count, heads.num_query * heads.dim)
        inputs = (qkv, pages.keys, pages.values, pages.table, tokens.rows, tokens.positions)
        sizes = (scale * _LOG2E, heads.width, pages.table.shape[1], window or 0)
        shape = {
            "KEY_HEADS": heads.num_key,
            "GROUP": group,
            "DIM": heads.dim,
            "DIM_BLOCK": dim_block,
        }
        flags = {
            "PAGE": pages.page_size,
            "WINDOWED": window is not None,
            "PRECISION": dot_precision(qkv),
        }
        if tokens.tiles is not None:
            stages = 3 if qkv.element_size() == 2 else 1
            triton_attention.prefill_kernel[(heads.num_query, tokens.tiles.shape[0])](
                *(*inputs, tokens.tiles, out, *sizes),
                **shape,
                **flags,
                **_blocks(dim_block, qkv.element_size(), stages),
                TILE=TILE,
            )
            return out
        splits = choose_splits(count * heads.num_key)
        shape |= {"GROUP_BLOCK": max(16, triton.next_power_of_2(group)), "SPLITS": splits}
        target = stats = out
        if splits > 1:
            num_partial = count * heads.num_key * splits * shape["GROUP_BLOCK"]
            target = out.new_empty(num_partial, dim_block, dtype=torch.float32)
            stats = out.new_empty(num_partial, 2, dtype=torch.float32)
        triton_attention.decode_kernel[(heads.num_key, count, splits)](
            *(*inputs, target, stats, *sizes),
            **shape,
            **flags,
            **_blocks(dim_block, qkv.element_size(), 3),
            **pdl_options(),
        )
        if splits > 1:
            triton_attention.combine_kernel[(count, heads.num_query)](
                target, stats, out, **shape, **pdl_options()
            )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        size = width // 2
        out = gate_up.new_empty(tokens, size)
        block = min(triton.next_power_of_2(size), 1024)
        grid = (tokens, triton.cdiv(size, block))
        triton_elementwise.silu_mul_kernel[grid](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
        return out

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        state: SamplingState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        count, vocab = logits.shape
        blocks = triton.cdiv(vocab, _VOCAB_BLOCK)
        stats = logits.new_empty(count, blocks, 2, dtype=torch.float32)
        tokens = logits.new_empty(count, dtype=torch.int32)
        log_probs = logits.new_empty(count, dtype=torch.float32)
        grid = (count, triton.cdiv(blocks, _BLOCKS_PER_PROGRAM))
        triton_sampling.block_sums_kernel[grid](
            *(logits, rows, state.temperatures, stats, vocab, blocks),
            BLOCK=_VOCAB_BLOCK,
            PER_PROGRAM=_BLOCKS_PER_PROGRAM,
            num_warps=4,
            **pdl_options(),
        )
        triton_sampling.sample_kernel[(count,)](
            *(logits, rows, positions, state.temperatures, state.seeds, stats),
            *(state.last_tokens, tokens, log_probs, vocab, blocks),
            BLOCK=_VOCAB_BLOCK,
            NUM_BLOCKS=triton.next_power_of_2(blocks),
            num_warps=4,
            **pdl_options(),
        )
        return tokens, log_probs


def choose_splits(programs: int) -> int:
    """Return how many programs split the KV cache of a request: more for small batches."""
    wanted = -(-_PROGRAMS // max(programs, 1))
    return min(triton.next_power_of_2(wanted), _MAX_SPLITS)


@functools.cache
def _blocks(dim: int, element_size: int, stages: int) -> dict[str, int]:
    """Return the KV block size and the pipeline stages, reduced until keys and values fit into the shared
    memory of an SM."""
    available = shared_memory() - TILE * dim * element_size - (8 << 10)  # queries and weights
    block = 64 if element_size == 2 else 32
    while 2 * block * dim * element_size * stages > available and block > 16:
        block, stages = (block, stages - 1) if stages > 1 else (block // 2, 1)
    return {"BLOCK": block, "num_warps": 4, "num_stages": stages}


def _warps(wanted: int) -> int:
    return min(max(triton.next_power_of_2(max(wanted, 1)), 1), 8)
