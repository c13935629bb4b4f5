"""Weights fused into one matmul, of which the parameters of the Hugging Face modules are views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from slime.engine.kernels.interface import AdapterRows, Affine, Kernels

if TYPE_CHECKING:
    from slime.engine.lora.bank import LoraBank

_ALIGNED = 16  # rows; aligns the output rows for fast cuBLAS kernels


class Projection:
    """Linears that share an input, and their adapters.

    On a GPU the rows of A may follow those of the weight in memory (`LoraBank.rows_below`), so that one matmul
    computes both.
    `split_k`: the output may be split-K partial sums.
    """

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        linears: tuple[nn.Linear, ...],
        kernels: Kernels,
        lora: LoraBank | None,
        *,
        split_k: bool = False,
    ) -> None:
        self._kernels, self._split_k = kernels, split_k
        below = 0 if lora is None or not kernels.joins_adapters else lora.rows_below(linears)
        self.base: Affine = (linears[0].weight, linears[0].bias)
        joined = None
        if below:
            below = -(-below // _ALIGNED) * _ALIGNED
            joined = join_linears(owner, f"{name}_joined", linears, below)
            weight, bias = joined
            self.base = (weight[:-below], None if bias is None else bias[:-below])
            for kind, tensor in zip(("weight", "bias"), self.base, strict=True):
                if tensor is not None:
                    register_tensor(owner, f"{name}_{kind}", tensor)
        elif len(linears) > 1:
            self.base = join_linears(owner, name, linears)
        self.lora = None if lora is None else lora.attach(linears, joined)

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        kernels = self._kernels
        if adapters is not None and self.lora is not None:
            return kernels.linear_lora(x, self.base, self.lora, adapters, self._split_k)
        return (kernels.linear_split_k if self._split_k else kernels.linear)(x, *self.base)


def join_linears(
    owner: nn.Module, name: str, linears: tuple[nn.Linear, ...], below: int = 0
) -> Affine:
    """Fuse linears into one weight and bias; their own become views, so that weight updates apply to both.

    `below`: number of zero rows to append.
    """
    weights, biases = [x.weight.data for x in linears], [x.bias for x in linears]
    if below:
        weights.append(weights[0].new_zeros(below, weights[0].shape[1]))
    weight = torch.cat(weights)
    if weight.device.type == "cpu" and not below:  # the memory layout of loading.py
        weight = weight.t().contiguous().t()
    bias = None
    if biases[0] is not None:
        bias = torch.cat([*(one.data for one in biases), biases[0].data.new_zeros(below)])
        register_tensor(owner, f"{name}_bias", bias)
    register_tensor(owner, f"{name}_weight", weight)
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


def register_tensor(owner: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Register a non-persistent buffer, so that the tensor moves with the module; return the tensor."""
    owner.register_buffer(f"fused_{name}", tensor, persistent=False)
    return tensor
