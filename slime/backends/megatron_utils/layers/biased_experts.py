"""Experts whose output has a bias (GPT-OSS)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear


class ExpertOutput(RowParallelLinear):
    """megatron-core adds an expert's bias to this output in place, which for what passed through its
    reduction over one rank, the same tensor still, autograd does not allow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron would add up the gradients of different experts' biases over the tensor ranks.
        self.bias.sequence_parallel = False

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Any]:
        output, bias = super().forward(input_)
        return output.clone(), bias
