"""Decoder layers of the trainer on a CPU against Hugging Face's own, values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slime.backends.fsdp_utils.attention import PACKED_ATTENTION
from slime.backends.fsdp_utils.cpu_layers import fuse_layers
from slime.backends.kernels.cpu_ops import add_rms_norm, cpu_library, silu_mul
from slime.backends.kernels.packed_attention import packed_layout

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no gcc here")

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama with biases": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=10)),
    "qwen3 with a window": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, **SLIDING)),
}
EQUAL, PADDED = [6, 6, 6], [1, 10, 9, 5, 9]  # samples of like lengths are padded to the longest


@pytest.mark.parametrize("lens", [EQUAL, PADDED], ids=["equal", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_hugging_faces(name: str, lens: list[int]):
    theirs = _random_model(*MODELS[name])
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(PACKED_ATTENTION)
    theirs.set_attn_implementation("eager")
    assert fuse_layers(ours) == 2
    samples = [torch.randint(32, (length,)) for length in lens]
    expected = torch.cat(
        [theirs(input_ids=sample[None], use_cache=False).logits[0] for sample in samples]
    )
    found = ours(
        input_ids=torch.cat(samples)[None],
        position_ids=torch.cat([torch.arange(length) for length in lens])[None],
        use_cache=False,
        packed=packed_layout(lens, torch.device("cpu")),
    ).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    upstream = torch.randn_like(expected)
    (expected * upstream).sum().backward()
    (found * upstream).sum().backward()
    mine = dict(ours.named_parameters())
    for key, param in theirs.named_parameters():
        _assert_close_to_largest(mine[key].grad, param.grad, key)


def test_other_models_and_attention_functions_are_left_alone():
    config = Gemma2Config(**SHAPE, head_dim=8, attn_implementation=PACKED_ATTENTION)
    assert fuse_layers(_random_model(Gemma2ForCausalLM, config)) == 0
    assert fuse_layers(_random_model(*MODELS["qwen3"])) == 0  # its attention function is not ours
    gelu = Qwen3Config(**SHAPE, hidden_act="gelu", attn_implementation=PACKED_ATTENTION)
    assert fuse_layers(_random_model(Qwen3ForCausalLM, gelu)) == 0


@pytest.mark.parametrize("rows", [1, 37])
def test_norm_of_a_sum(rows: int):
    torch.manual_seed(rows)
    leaves = [torch.randn(rows, 19), torch.randn(rows, 19), torch.randn(19)]
    upstream = [torch.randn(rows, 19), torch.randn(rows, 19)]

    def plain(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor):
        total = x + delta
        return total, F.rms_norm(total, (19,), weight, 1e-3)

    def ours(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor):
        return add_rms_norm(x, delta, weight, 1e-3)

    _assert_same(ours, plain, leaves, upstream)


@pytest.mark.parametrize("rows", [1, 37])
def test_activation(rows: int):
    torch.manual_seed(rows)
    gate_up = torch.randn(rows, 2 * 21) * 20
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -80.0])

    def plain(x: torch.Tensor):
        return (F.silu(x[:, :21]) * x[:, 21:],)

    _assert_same(lambda x: (silu_mul(x),), plain, [gate_up], [torch.randn(rows, 21)])


def _random_model(model_class: type, config) -> nn.Module:
    torch.manual_seed(0)
    model = model_class(config)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5)
    return model


def _assert_same(ours, plain, leaves: list[torch.Tensor], upstream: list[torch.Tensor]) -> None:
    """`plain` is computed in double precision."""
    values, gradients = [], []
    for function, dtype in ((ours, torch.float32), (plain, torch.float64)):
        inputs = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
        outputs = function(*inputs)
        pairs = zip(outputs, upstream, strict=True)
        total = sum((out * grad.to(dtype)).sum() for out, grad in pairs)
        values.append([out.detach() for out in outputs])
        gradients.append(torch.autograd.grad(total, inputs))
    for found, expected in zip(*values, strict=True):
        _assert_close_to_largest(found, expected, "value")
    for found, expected in zip(*gradients, strict=True):
        _assert_close_to_largest(found, expected, "gradient")


def _assert_close_to_largest(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Within 1e-5 of the largest entry: sums of floats have no better relative precision."""
    largest = float(expected.abs().max())
    difference = float((found.double() - expected.double()).abs().max())
    assert difference <= 1e-5 * largest, f"{name}: off by {difference}, largest is {largest}"
