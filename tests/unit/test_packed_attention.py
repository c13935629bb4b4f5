"""Packed attention against one sample at a time, written out with softmax."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slime.backends.fsdp_utils.attention import packed_attention
from slime.backends.fsdp_utils.fused_norm import fuse_norms
from slime.backends.kernels.packed_attention import packed_layout
from slime.backends.kernels.rms_norm import rms_norm
from slime.core.errors import UserError

HEADS, KV_HEADS, DIM = 4, 2, 8


def _layout(lens: list[int]):
    return packed_layout(lens, torch.device("cpu"))


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


def test_rms_norm_has_the_value_and_gradient_of_its_definition():
    torch.manual_seed(0)
    norm = FakeRMSNorm(16, 0.0)
    x = torch.randn(2, 5, 16, requires_grad=True)
    upstream = torch.randn(2, 5, 16)
    expected, found = norm(x), rms_norm(x, norm.weight, 1e-5)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), [x, norm.weight]),
        torch.autograd.grad((expected * upstream).sum(), [x, norm.weight]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_norms_that_compute_the_same_are_replaced():
    class GemmaRMSNorm(FakeRMSNorm):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(FakeRMSNorm(8, 0.0), GemmaRMSNorm(8, 1.0), FakeRMSNorm(8, 0.0))
    x = torch.randn(4, 8)
    expected = model(x)
    assert fuse_norms(model) == 2
    torch.testing.assert_close(model(x), expected)
