"""Calls the kernels of cpu.c with the addresses of contiguous float32 tensors."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from slime.algorithms import delta_layers
from slime.algorithms.delta_layers import DeltaInputs
from slime.algorithms.gated_delta import DeltaHeads
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
from slime.engine.kernels.lora import add_lora
from slime.engine.kv_cache import StateCache
from slime.engine.scheduler.sampling import uniforms

SOURCE = Path(__file__).with_name("cpu.c")
_P, _L, _F = c_void_p, c_long, c_float
_FEW_ROWS = 32  # up to so many rows one C kernel for adapters is faster than several BLAS calls
_SIGNATURES = {
    "add_rms_norm": [_P, _P, _P, _P, _L, _L, _F, _F],
    "rope_store": [_P, _L, _L, _L, _L, _P, _P, _P, _P, _F, _P, _P, _P, _P, _L, _L, _P, _P],
    "attend": [_P, _L, _L, _L, _L, _P, _P, _P, _L, _L, _P, _P, _F, _L, _P],
    "add_lora": [*[_P] * 8, *[_L] * 5],
    "silu_mul": [_P, _P, _L, _L],
    "sample_tokens": [_P, _L, _L, _P, _P, _P, _L, _P, _P],
}


class CpuKernels:
    experts: MoeKernels | None = None
    joins_adapters = False
    delta_gates = staticmethod(delta_layers.delta_gates)

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
        self._library = library

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        zero_centred: bool = False,
    ) -> torch.Tensor:
        out = torch.empty_like(hidden)
        self._library.add_rms_norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *hidden.shape,
            eps,
            float(zero_centred),
        )
        return out

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)

    linear_split_k = linear  # never split on a CPU

    def gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.silu_mul(F.linear(x, weight, bias))

    def add_lora(
        self, out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows
    ) -> None:
        if len(x) > _FEW_ROWS or out.ndim > 2:
            add_lora(out, x, weights, rows)
            return
        parts, columns = len(weights.widths), out.shape[1]
        self._library.add_lora(
            *(tensor.data_ptr() for tensor in (out, x, weights.a, weights.b, weights.scales)),
            rows.slots.data_ptr(),
            weights.ranks.ctypes.data,
            (c_long * parts)(*weights.widths),
            *(parts, columns, weights.b.shape[2], x.shape[1], len(x)),
        )

    def linear_lora(
        self, x: torch.Tensor, base: Affine, lora: LoraWeights, rows: AdapterRows, split_k: bool
    ) -> torch.Tensor:
        out = F.linear(x, *base)
        self.add_lora(out, x, lora, rows)
        return out

    def gated_linear_lora(
        self, x: torch.Tensor, base: Affine, lora: LoraWeights, rows: AdapterRows
    ) -> torch.Tensor:
        return self.silu_mul(self.linear_lora(x, base, lora, rows, split_k=False))

    def rope_store(
        self,
        qkv: torch.Tensor,
        tokens: Tokens,
        heads: Heads,
        pages: Pages,
        rotary: Rotary,
        norm: QueryKeyNorm | None,
    ) -> None:
        norm = None if norm is None else norm.plain()
        self._library.rope_store(
            qkv.data_ptr(),
            qkv.shape[0],
            heads.num_query,
            heads.num_key,
            heads.dim,
            rotary.cosines.data_ptr(),
            rotary.sines.data_ptr(),
            None if norm is None else norm.query.data_ptr(),
            None if norm is None else norm.key.data_ptr(),
            0.0 if norm is None else norm.eps,
            (tokens.positions if tokens.angles is None else tokens.angles).data_ptr(),
            *_place(tokens, pages),
            pages.keys.data_ptr(),
            pages.values.data_ptr(),
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
        out = qkv.new_empty(qkv.shape[0], heads.num_query * heads.dim)
        self._library.attend(
            qkv.data_ptr(),
            qkv.shape[0],
            heads.num_query,
            heads.num_key,
            heads.dim,
            *_place(tokens, pages),
            pages.keys.data_ptr(),
            pages.values.data_ptr(),
            scale,
            window or 0,
            out.data_ptr(),
        )
        return out

    def gate_heads(self, x: torch.Tensor, gates: torch.Tensor, dim: int) -> torch.Tensor:
        gate = gates[:, : 2 * x.shape[1]].unflatten(1, (-1, 2 * dim))[:, :, dim:]
        return x * gate.flatten(1).sigmoid()

    def add_gated(self, x: torch.Tensor, gate: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        return x + gate.sigmoid() * (parts.sum(0) if parts.ndim == 3 else parts)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return delta_layers.gated_norm(x, gate.reshape(x.shape), weight, eps).flatten(1)

    def continue_rows(
        self,
        inputs: DeltaInputs,
        weight: torch.Tensor,
        heads: DeltaHeads,
        states: StateCache,
        layer: int,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Continue each row by one token; the runners on a CPU pass a StatePlan and do not call this."""
        before = states.read(layer, rows.long())
        out, after = delta_layers.continue_tokens(inputs, weight, heads, before)
        states.write(layer, rows.long(), after)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty(tokens, width // 2)
        self._library.silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width // 2)
        return out

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        state: SamplingState,
        forbidden: np.ndarray | None = None,  # [R, B] int32, tokens not to sample, padded with -1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float().contiguous()
        index = rows.long()
        temperatures = state.temperatures[index].numpy()
        seeds = state.seeds[index].numpy().view(np.uint64)
        uniform = uniforms(seeds, positions.numpy() + 1)
        uniform[temperatures < 0.0] = -1.0  # greedy
        np.abs(temperatures, out=temperatures)
        tokens = torch.empty(len(index), dtype=torch.int32)
        log_probs = torch.empty(len(index), dtype=torch.float32)
        self._library.sample_tokens(
            logits.data_ptr(),
            *logits.shape,
            temperatures.ctypes.data,
            uniform.ctypes.data,
            None if forbidden is None else forbidden.ctypes.data,
            0 if forbidden is None else forbidden.shape[1],
            tokens.data_ptr(),
            log_probs.data_ptr(),
        )
        state.last_tokens[index] = tokens
        return tokens, log_probs


def _place(tokens: Tokens, pages: Pages) -> tuple[int, int, int, int, int]:
    return (
        tokens.positions.data_ptr(),
        tokens.rows.data_ptr(),
        pages.table.data_ptr(),
        pages.table.shape[1],
        pages.page_size,
    )
