"""Fused operations against the plain ones, values and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from slime.backends.kernels.fused_ops import fuse_mlps, rotate, swiglu_down


def test_swiglu_down_is_the_plain_product():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weight = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 5, 6, dtype=torch.float64)
    expected = F.linear(F.silu(inputs[0]) * inputs[1], weight)
    found = swiglu_down(*inputs, weight)
    torch.testing.assert_close(found, expected)
    leaves = [*inputs, weight]
    for mine, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), leaves),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_rotation_is_hugging_faces():
    torch.manual_seed(0)
    x = torch.randn(7, 3, 8)  # [T, heads, D]
    half = torch.randn(7, 1, 4)
    angles = torch.cat([half, half], dim=-1)
    q = x.transpose(0, 1).unsqueeze(0)  # [1, heads, T, D]
    cos, sin = (f(angles).transpose(0, 1) for f in (torch.cos, torch.sin))  # [1, T, D]
    expected, _ = apply_rotary_pos_emb(q, q, cos, sin)
    torch.testing.assert_close(rotate(x, angles), expected[0].transpose(0, 1))


def test_mlps_of_a_model_are_found_and_compute_the_same():
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    tokens = torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        before = model(tokens).logits
        assert fuse_mlps(model) == 2
        torch.testing.assert_close(model(tokens).logits, before)


def test_another_activation_is_left_alone():
    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(self, name, nn.Linear(4, 4, bias=False))
            self.act_fn = nn.GELU()

    assert fuse_mlps(nn.Sequential(Gelu())) == 0
