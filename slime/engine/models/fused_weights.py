"""Weights that run as one matmul, while the parameters of the Hugging Face modules stay what they are."""

from __future__ import annotations

import torch
from torch import nn


def join_linears(
    owner: nn.Module, name: str, linears: tuple[nn.Linear, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fuse linears into one weight and bias; theirs become views, so that weight updates write to both."""
    weight = torch.cat([linear.weight.data for linear in linears])
    if weight.device.type == "cpu":  # the memory layout of loading.py
        weight = weight.t().contiguous().t()
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.data for linear in linears])
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


def register_tensor(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a non-persistent buffer, so that the tensor moves with the module."""
    owner.register_buffer(f"fused_{name}", tensor, persistent=False)
