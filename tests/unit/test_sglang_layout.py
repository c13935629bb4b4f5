"""Checksums of what an SGLang server holds, foretold from Hugging Face tensors."""

import hashlib
import random

import torch

from slime.backends.sglang_utils.layout import ServedSums, is_exact


def sha(*tensors: torch.Tensor) -> str:
    joined = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def test_fused_parameters_in_any_order_of_arrival():
    attention = {part: torch.randn(3, 4) for part in ("q", "k", "v")}
    gate, up, down = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)
    norm, embedding = torch.randn(4), torch.randn(70, 4)
    sent = {
        **{f"model.layers.0.self_attn.{p}_proj.weight": t for p, t in attention.items()},
        "model.layers.0.self_attn.q_proj.bias": torch.ones(3),
        "model.layers.0.self_attn.k_proj.bias": torch.ones(3) * 2,
        "model.layers.0.self_attn.v_proj.bias": torch.ones(3) * 3,
        "model.layers.0.mlp.gate_proj.weight": gate,
        "model.layers.0.mlp.up_proj.weight": up,
        "model.layers.0.mlp.down_proj.weight": down,
        "model.layers.0.self_attn.q_norm.weight": norm,
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
    }
    padded = torch.cat([embedding, torch.zeros(58, 4)])  # 128 rows
    expected = {
        "model.layers.0.self_attn.qkv_proj.weight": sha(*attention.values()),
        "model.layers.0.self_attn.qkv_proj.bias": sha(
            torch.ones(3), torch.ones(3) * 2, torch.ones(3) * 3
        ),
        "model.layers.0.mlp.gate_up_proj.weight": sha(gate, up),
        "model.layers.0.mlp.down_proj.weight": sha(down),
        "model.layers.0.self_attn.q_norm.weight": sha(norm),
        "model.embed_tokens.weight": sha(padded),
        "lm_head.weight": sha(padded),
    }
    for seed in range(5):
        order = list(sent)
        random.Random(seed).shuffle(order)
        sums = ServedSums()
        for name in order:
            buffer = sent[name].clone()
            sums.add(name, buffer)
            buffer.zero_()  # buckets are used again
        assert sums.sums == expected


def test_only_models_whose_layout_is_known_are_compared_bit_by_bit():
    assert is_exact(["Qwen3ForCausalLM"])
    assert not is_exact(["Qwen3MoeForCausalLM"])
    assert not is_exact(None) and not is_exact([])
