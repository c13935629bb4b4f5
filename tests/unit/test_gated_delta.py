"""The packed gated delta net equals a loop over the tokens of each sample, with every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from slime.algorithms import delta_kernels
from slime.algorithms.gated_delta import (
    DeltaHeads,
    chunk_layout,
    continue_conv,
    continue_delta_rule,
    gated_delta_net,
)

HEADS = DeltaHeads(num_key=2, num_value=4, key_dim=8, value_dim=6)
CPU = torch.device("cpu")


def make_inputs(total: int, dtype=torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """Input of the convolution, its weight, decay and beta, as they occur in a model."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    width = sum(HEADS.widths)
    decay = -normal(HEADS.num_value).exp() * F.softplus(normal(total, HEADS.num_value))
    inputs = normal(total, width), normal(width, 4), decay, normal(total, HEADS.num_value).sigmoid()
    return [x.requires_grad_() for x in inputs]


def naive_net(mixed, weight, decay, beta):
    """One sample, token by token, as the paper defines it."""
    kernel = weight.shape[1]
    before = torch.cat([mixed.new_zeros(kernel - 1, mixed.shape[1]), mixed])
    rows = [(before[t : t + kernel] * weight.t()).sum(0) for t in range(len(mixed))]
    query, key, value = F.silu(torch.stack(rows)).split(HEADS.widths, dim=1)
    repeats = HEADS.num_value // HEADS.num_key
    query, key = (
        x.unflatten(1, (HEADS.num_key, HEADS.key_dim)).repeat_interleave(repeats, 1)
        for x in (query, key)
    )
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    value = value.unflatten(1, (HEADS.num_value, HEADS.value_dim))
    state = mixed.new_zeros(HEADS.num_value, HEADS.key_dim, HEADS.value_dim)
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        held = (state * k[:, :, None]).sum(1)
        state = state + k[:, :, None] * (b[:, None] * (v - held))[:, None, :]
        outs.append((state * q[:, :, None]).sum(1) * HEADS.key_dim**-0.5)
    return torch.stack(outs)


@pytest.mark.parametrize("lens", [(1,), (5, 1, 9), (64, 63, 65), (130, 2, 200, 64)])
def test_outputs_and_gradients_are_those_of_the_recurrence(lens):
    inputs = make_inputs(sum(lens))
    probe = make_inputs(sum(lens), seed=1)[0][:, : HEADS.value_dim].detach()[:, None]
    ours = gated_delta_net(*inputs, HEADS, lens)
    mixed, weight, decay, beta = inputs
    samples = zip(*(x.split(lens) for x in (mixed, decay, beta)), strict=True)
    theirs = torch.cat([naive_net(m, weight, g, b) for m, g, b in samples])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad((ours * probe).sum(), inputs)
    expected = torch.autograd.grad((theirs * probe).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_one_sample_in_fp32_is_what_transformers_computes():
    total = 150
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(total, 4, 8, generator=generator) for _ in range(3))
    g, beta = -torch.rand(total, 4, generator=generator), torch.rand(total, 4, generator=generator)
    ours, _ = continue_delta_rule(q, k, v, g, beta, chunk_layout((total,), CPU))
    theirs, _ = torch_chunk_gated_delta_rule(
        q[None], k[None], v[None], g=g[None], beta=beta[None], use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=1e-6)


def test_strong_decay_neither_overflows_nor_loses_the_gradient():
    mixed, weight, _, beta = make_inputs(100, torch.float32)
    decay = torch.full((100, HEADS.num_value), -80.0, requires_grad=True)
    out = gated_delta_net(mixed, weight, decay, beta, HEADS, (100,))
    grads = torch.autograd.grad(out.sum(), [mixed, decay, beta])
    assert all(x.isfinite().all() for x in (out, *grads))


def test_values_that_are_not_finite_stay_in_their_sample():
    mixed, weight, decay, beta = make_inputs(90, torch.float32)
    with torch.no_grad():
        mixed[:40] = float("nan")
        out = gated_delta_net(mixed, weight, decay, beta, HEADS, (40, 50))
        alone = gated_delta_net(mixed[40:], weight, decay[40:], beta[40:], HEADS, (50,))
    assert out[:40].isnan().all()
    torch.testing.assert_close(out[40:], alone)


def test_a_layout_first_made_for_inference_serves_training():
    inputs = make_inputs(77)
    with torch.inference_mode():
        gated_delta_net(*inputs, HEADS, (7, 70))
    out = gated_delta_net(*inputs, HEADS, (7, 70))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_computes_in_plain_torch(dtype: torch.dtype):
    """Also where the kernels for GPUs are installed."""
    mixed, weight, decay, beta = make_inputs(77, torch.float32)
    inputs = mixed.to(dtype), weight.to(dtype), decay, beta.to(dtype)
    found = delta_kernels.gated_delta_net(*inputs, HEADS, (7, 70))
    assert torch.equal(found, gated_delta_net(*inputs, HEADS, (7, 70)))


def test_a_convolution_starts_at_zero_in_every_sample():
    x = torch.ones(5, 1)
    weight = torch.tensor([[1.0, 10.0, 100.0]])
    out, _ = continue_conv(x, weight, chunk_layout((3, 2), CPU))
    assert out.squeeze(1).tolist() == [100, 110, 111, 100, 110]


@settings(max_examples=20, deadline=None)
@given(data=st.data(), lens=st.lists(st.integers(1, 140), min_size=2, max_size=6))
def test_neighbours_and_order_never_change_a_sample(data, lens):
    """Outputs and gradients of every sample are those that it has alone."""
    order = data.draw(st.permutations(range(len(lens))))
    mixed, weight, decay, beta = make_inputs(sum(lens), torch.float32, seed=sum(lens))
    samples = list(zip(*(x.split(lens) for x in (mixed, decay, beta)), strict=True))
    packed = [torch.cat([samples[i][part] for i in order]) for part in range(3)]
    together = gated_delta_net(
        packed[0], weight, packed[1], packed[2], HEADS, tuple(lens[i] for i in order)
    ).split([lens[i] for i in order])
    for place, i in enumerate(order):
        m, g, b = samples[i]
        alone = gated_delta_net(m, weight, g, b, HEADS, (lens[i],))
        torch.testing.assert_close(together[place], alone, rtol=1e-5, atol=1e-5)
    sources = [mixed, weight, decay, beta]
    found = torch.autograd.grad(sum(x.square().sum() for x in together), sources)
    alone = [gated_delta_net(m, weight, g, b, HEADS, (len(m),)) for m, g, b in samples]
    expected = torch.autograd.grad(sum(x.square().sum() for x in alone), sources)
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=1e-9)  # the decay of a first token does nothing
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=2e-5)
