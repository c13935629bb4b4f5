"""Packed attention against one sample at a time, written out with softmax."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slime.backends.fsdp_utils.model import PACKED_ATTENTION, packed_attention
from slime.backends.kernels import packed_attention as kernels
from slime.backends.kernels.fused_ops import fuse_norms
from slime.backends.kernels.packed_attention import packed_layout
from slime.core.errors import UserError

HEADS, KV_HEADS, DIM = 4, 2, 8
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


def _layout(lens: list[int]):
    return packed_layout(lens, torch.device("cpu"))


def test_a_long_sample_is_a_kernel_call_of_its_own():
    lens = [70, 1, 4096, 4095, 9001, 10_000, 5]
    runs = packed_layout(lens, torch.device("cpu")).runs
    found = [
        [run.tokens] if run.cu_seqlens is None else run.cu_seqlens.diff().tolist() for run in runs
    ]
    assert found == [[70, 1], [4096], [4095], [9001], [10_000], [5]]
    assert [run.cu_seqlens is None for run in runs] == [False, True, False, True, True, False]
    assert [run.longest for run in runs] == [max(members) for members in found]
    assert [run.tokens for run in runs] == [sum(members) for members in found]
    assert [run.padding for run in runs] == [0, 0, 0, 215, 240, 0]


def _naive(query, key, value, lens, scaling, window, sinks=None):
    """[1, T, heads, D] from [1, heads, T, D], sample by sample and head by head."""
    out = torch.zeros(query.shape[2], HEADS, DIM)
    start = 0
    for length in lens:
        place = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (distance >= 0) & (distance < (window or length))
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            scores = query[0, head, place] @ key[0, kv_head, place].T * scaling
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].expand(length, 1)], dim=1)
            out[place, head] = scores.softmax(-1)[:, :length] @ value[0, kv_head, place]
        start += length
    return out.unsqueeze(0)


@pytest.mark.parametrize("message", [None, "cuDNN Frontend error: No execution plans support it."])
@pytest.mark.parametrize("recompute", [False, True])
def test_samples_that_cudnn_refuses_are_computed_by_the_varlen_kernel(
    monkeypatch, caplog, message: str | None, recompute: bool
):
    """torch has no cuDNN kernel for a CPU. Padded SDPA calls play its varlen kernel."""
    torch.manual_seed(0)
    lens, calls = [600, 64, 512, 600], []

    def varlen(query, key, value, offsets, longest, scale, window):
        calls.append(offsets[0].diff().tolist())
        layout = packed_layout(calls[-1], query.device)
        return kernels._attend_padded(query, key, value, layout, scale, window, None)

    def refuse(*args, **options):
        raise RuntimeError(message)

    monkeypatch.setattr(kernels, "LONG_SAMPLE", 512)
    monkeypatch.setattr(kernels, "_refused", set())
    monkeypatch.setattr(kernels, "_call_varlen_kernel", varlen)
    monkeypatch.setattr(kernels, "_has_varlen_kernel", lambda *_: True)
    monkeypatch.setattr(kernels, "_has_long_kernel", lambda _: True)
    if message is not None:  # of cuDNN itself; all other calls keep torch's function
        sdpa, pad = kernels.F.scaled_dot_product_attention, kernels.F.pad
        played = SimpleNamespace(pad=pad, scaled_dot_product_attention=refuse)
        monkeypatch.setattr(kernels, "F", played)
        monkeypatch.setattr(
            kernels, "_attend", lambda q, k, v, *_: sdpa(q, k, v, is_causal=True, enable_gqa=True)
        )
    layout = packed_layout(lens, torch.device("cpu"))
    inputs = [torch.randn(sum(lens), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    expected = kernels._attend_padded(*inputs, layout, None, None, None)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for _ in range(2):
        if recompute:
            found = checkpoint(kernels.attend_packed, *inputs, layout, use_reentrant=False)
        else:
            found = kernels.attend_packed(*inputs, layout)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), inputs), wanted)
    assert calls == (4 if recompute else 2) * [[600], [64], [512], [600]]
    (record,) = caplog.records
    assert "samples of 1024 tokens with 4 heads of 8" in record.message


@pytest.mark.parametrize(
    "lens",
    [[7], [5, 5, 5], [4, 5, 5], [1, 1, 2, 30], [30, 3, 29, 28, 3], [2, 3, 4, 5, 6, 7, 8, 9]],
)
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_same_output_and_gradients_as_sample_by_sample(lens, window, with_sinks):
    torch.manual_seed(0)
    shapes = [(1, h, sum(lens), DIM) for h in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    sinks = torch.randn(HEADS, requires_grad=True) if with_sinks else None
    inputs += [sinks] if with_sinks else []
    found, _ = packed_attention(
        nn.Module(),
        *inputs[:3],
        None,
        packed=_layout(lens),
        scaling=0.3,
        sliding_window=window,
        s_aux=sinks,
    )
    expected = _naive(*inputs[:3], lens, 0.3, window, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("need", ["softcap", "position_bias"])
def test_what_it_cannot_do_is_refused(need):
    q, k = torch.randn(1, HEADS, 3, DIM), torch.randn(1, KV_HEADS, 3, DIM)
    with pytest.raises(UserError, match=need):
        packed_attention(nn.Module(), q, k, k, None, packed=_layout([3]), **{need: 1.0})


class FakeRMSNorm(nn.Module):
    """As Hugging Face writes it; `offset` 1 is Gemma's way."""

    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-5
        self.offset = offset

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return (self.weight + self.offset) * (x * torch.rsqrt(variance + self.variance_epsilon))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_norm_has_the_value_and_gradient_of_its_definition(offset: float):
    torch.manual_seed(0)
    norm = FakeRMSNorm(16, offset)
    x = torch.randn(2, 5, 16, requires_grad=True)
    upstream = torch.randn(2, 5, 16)
    expected = norm(x)
    assert fuse_norms(norm) == 1
    found = norm(x)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), [x, norm.weight]),
        torch.autograd.grad((expected * upstream).sum(), [x, norm.weight]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_norms_that_compute_the_same_are_replaced():
    class OtherRMSNorm(FakeRMSNorm):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(FakeRMSNorm(8, 0.0), OtherRMSNorm(8, 2.0), FakeRMSNorm(8, 0.0))
    x = torch.randn(4, 8)
    expected = model(x)
    assert fuse_norms(model) == 2
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("lens", [EQUAL, PADDED], ids=["equal", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_models_equal_hugging_face_sample_by_sample(name: str, lens: list[int]):
    theirs = _random_model(*MODELS[name])
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(PACKED_ATTENTION)
    theirs.set_attn_implementation("eager")
    assert fuse_norms(ours) >= 5  # two per layer and the final one
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


def _random_model(model_class: type, config) -> nn.Module:
    torch.manual_seed(0)
    model = model_class(config)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5)
    return model


def _assert_close_to_largest(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Within 1e-5 of the largest entry: sums of floats have no better relative precision."""
    largest = float(expected.abs().max())
    difference = float((found.double() - expected.double()).abs().max())
    assert difference <= 1e-5 * largest, f"{name}: off by {difference}, largest is {largest}"
