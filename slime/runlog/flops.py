"""How much arithmetic a model needs, counted from its shape; the ground of MFU.

A multiplication and an addition are two operations. A forward pass costs two per weight and token in
the matrices a token passes through, plus attention; a backward pass costs twice the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Dense bf16 operations per second by the vendor's data sheet, by what the driver calls the card.
_PEAK_BF16 = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


@dataclass(kw_only=True, frozen=True)
class ModelShape:
    """The matrices of a causal transformer. Qwen3-4B: hidden 2560, 36 layers, 32 heads of 128, 8 KV."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int  # of a dense layer
    experts_per_token: int = 0  # in a mixture-of-experts layer
    expert_ffn: int = 0
    shared_ffn: int = 0
    num_experts: int = 0
    dense_layers: int | None = None  # None: all of them, or none in a mixture of experts

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the content of config.json, or a HF config's to_dict()."""
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("n_routed_experts") or 0
        experts = experts or config.get("num_local_experts") or 0
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            ffn=config.get("intermediate_size") or 0,
            num_experts=experts,
            experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
            expert_ffn=config.get("moe_intermediate_size") or config.get("intermediate_size") or 0,
            shared_ffn=config.get("shared_expert_intermediate_size") or 0,
            dense_layers=config.get("first_k_dense_replace"),
        )

    @property
    def weights_per_token(self) -> int:
        """Entries of the matrices one token is multiplied with, the output head included."""
        heads = 2 * self.heads + 2 * self.kv_heads  # q and o, k and v
        attention = self.hidden * heads * self.head_dim
        dense = 3 * self.hidden * self.ffn
        expert = 3 * self.hidden * (self.experts_per_token * self.expert_ffn + self.shared_ffn)
        expert += self.hidden * self.num_experts  # the router
        dense_layers = self.dense_layers or 0 if self.num_experts else self.layers
        mixed = dense_layers * dense + (self.layers - dense_layers) * expert
        return self.layers * attention + mixed + self.hidden * self.vocab


def forward_flops(shape: ModelShape, lens: Iterable[int]) -> float:
    """Of sequences with these lengths; attention counts the pairs a causal mask leaves."""
    lens = list(lens)
    pairs = sum(n * (n + 1) / 2 for n in lens)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs  # scores, and their use
    return 2.0 * shape.weights_per_token * sum(lens) + attention


def train_flops(shape: ModelShape, lens: Iterable[int]) -> float:
    """Forward and backward, once; what is computed a second time to save memory does not count."""
    return 3.0 * forward_flops(shape, lens)


def peak_flops(gpu_name: str) -> float | None:
    """Of one card in bf16, by its data sheet; None for a card that is not in the table."""
    matches = [name for name in _PEAK_BF16 if name in gpu_name]
    return _PEAK_BF16[max(matches, key=len)] if matches else None
