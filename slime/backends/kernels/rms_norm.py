"""RMS norm in few passes over memory, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slime.backends.kernels import cpu_ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if on_cpu and cpu_ops.cpu_library() is not None:
        return cpu_ops.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)
