"""RMS norm in few passes over memory, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        square_sum = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse = square_sum.div_(x.shape[-1]).add_(eps).rsqrt_()  # 1 / rms, one per row
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """dx = r g w - x r^3 sum(g w x) / H;  dw = sum over rows of g x r."""
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        grad_x = (grad * x).reshape(-1, size)
        inverse_column = inverse.reshape(-1)
        grad_weight = torch.mv(grad_x.t(), inverse_column)
        along_x = torch.mv(grad_x, weight).mul_(inverse_column.pow(3)).div_(-size)
        grad_x = torch.mul(grad, weight).mul_(inverse)
        return grad_x.addcmul_(x, along_x.reshape(inverse.shape)), grad_weight, None
