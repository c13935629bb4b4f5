"""Causal attention of packed samples, forward and backward, by the kernels that torch has on one GPU.

    python benchmarks/attention_gpu.py [--tokens 65536] [--samples 1 4 8 16 32]

varlen      torch.nn.attention.varlen over all samples at once (FlashAttention 2)
cudnn       scaled_dot_product_attention by cuDNN's kernel, sample by sample
slime       what the trainers call: varlen for short samples, cuDNN for long ones

Qwen3-4B's heads (32 of queries, 8 of keys, 128 wide), bf16. TFLOP/s count the causal half: 4 T^2 / 2 * heads * width
forward and 2.5 times that backward. Errors are relative to the norm of varlen's result. Medians of five; the first call,
in which cuDNN compiles a graph for the length, is shown beside them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from torch.nn.attention.varlen import varlen_attn  # noqa: E402

from slime.backends.kernels.packed_attention import (  # noqa: E402
    attend_packed,
    packed_layout,
    repeats_keys,
)

HEADS, KV_HEADS, WIDTH = 32, 8, 128
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int]], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.tokens} tokens")
    for count in options.samples:
        compare([options.tokens // count] * count)


def compare(lens: list[int]) -> None:
    expected: list[torch.Tensor] = []
    rates: dict[str, float] = {}
    for name, attention in KERNELS.items():
        try:
            (first, seconds), results = measure(attention, lens)
        except RuntimeError as error:
            print(f"{len(lens):3} samples  {name:7} {str(error).splitlines()[0][:120]}")
            continue
        expected = expected or results
        errors = [
            float((found - right).norm() / right.norm())
            for found, right in zip(results, expected, strict=True)
        ]
        flops = 3.5 * 4 * HEADS * WIDTH * sum(n * n for n in lens) / 2
        rates[name] = flops / seconds
        print(
            f"{len(lens):3} samples  {name:7} {1000 * seconds:8.2f} ms  {rates[name] / 1e12:6.0f} TFLOP/s"
            f"  first call {1000 * first:6.0f} ms  largest error {max(errors):.1e}"
        )
    for name in rates.keys() - {"varlen"}:
        print(f"RATIO attention_gpu_{name}_{lens[0]}_tokens {rates[name] / rates['varlen']:.2f}")


def measure(
    attention: Attention, lens: list[int]
) -> tuple[tuple[float, float], list[torch.Tensor]]:
    """Return seconds of forward and backward, first call and median, and output and gradients of q, k and v."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [
        torch.randn(sum(lens), heads, WIDTH, **options).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    upstream = torch.randn(sum(lens), HEADS, WIDTH, **options)
    seconds, results = [], []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        q, k, v = inputs
        out = attention(q, k, v, lens)
        results = [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return (seconds[0], statistics.median(seconds[1:])), [x.float() for x in results]


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int]) -> torch.Tensor:
    options: dict[str, Any] = {} if repeats_keys() else {"enable_gqa": True}
    if repeats_keys():
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    cu_seqlens = packed_layout(lens, q.device).cu_seqlens
    bounds = (cu_seqlens, cu_seqlens, max(lens), max(lens))
    out = varlen_attn(q, k, v, *bounds, window_size=(-1, 0), **options)
    assert isinstance(out, torch.Tensor)
    return out


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int]) -> torch.Tensor:
    outs = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for part in zip(q.split(lens), k.split(lens), v.split(lens), strict=True):
            rows = [x.transpose(0, 1).unsqueeze(0) for x in part]  # [1, heads, L, D]
            out = F.scaled_dot_product_attention(
                rows[0], rows[1], rows[2], is_causal=True, enable_gqa=True
            )
            outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def slime(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: list[int]) -> torch.Tensor:
    return attend_packed(q, k, v, packed_layout(lens, q.device))


KERNELS: dict[str, Attention] = {"varlen": varlen, "cudnn": cudnn, "slime": slime}

if __name__ == "__main__":
    main()
