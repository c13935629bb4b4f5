"""The critic's value head: one value per token."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to values, zero at first, replicated on tensor ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T]."""
        return (hidden @ self.weight.t()).squeeze(1).float()
