"""Linear maps of many experts at once against a loop over the experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slime.backends.kernels.grouped_linear import expert_rows, grouped_linear, make_groups

SIZES = [3, 0, 6, 1]
TOKENS, EXPERTS = sum(SIZES), len(SIZES)


def groups():
    return make_groups(SIZES, torch.device("cpu"))


def matrices(out_dim, in_dim, *, gap=0):
    """Parameters of each expert; with `gap` numbers between them in one buffer, as Megatron's are."""
    torch.manual_seed(out_dim)
    values = torch.randn(EXPERTS, out_dim, in_dim)
    if gap is None:
        return [value.clone().requires_grad_() for value in values]
    buffer = torch.zeros(EXPERTS, out_dim * in_dim + gap)
    buffer[:, : out_dim * in_dim] = values.flatten(1)
    parts = buffer[:, : out_dim * in_dim].unflatten(1, (out_dim, in_dim))
    return [part.detach().requires_grad_() for part in parts]


@pytest.mark.parametrize("gap", [None, 0, 12])
@pytest.mark.parametrize("sizes", [(16, 8), (10, 6)], ids=["aligned", "odd"])
def test_outputs_and_gradients_of_the_loop(sizes, gap):
    weights = matrices(*sizes, gap=gap)
    x = torch.randn(TOKENS, sizes[1], requires_grad=True)
    factor = torch.randn(TOKENS, sizes[0])
    found = _results(grouped_linear(x, groups(), weights), x, weights, factor)
    parts = zip(x.split(SIZES), weights, strict=True)
    looped = torch.cat([F.linear(part, weight) for part, weight in parts])
    for one, other in zip(found, _results(looped, x, weights, factor), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_and_their_gradients_of_the_loop():
    torch.manual_seed(0)
    vectors = [torch.randn(6, requires_grad=True) for _ in SIZES]
    factor = torch.randn(TOKENS, 6)
    rows = expert_rows(groups(), vectors)
    looped = torch.cat([v.expand(n, -1) for v, n in zip(vectors, SIZES, strict=True)])
    assert torch.equal(rows, looped)
    for one, other in zip(
        _grads(rows, vectors, factor), _grads(looped, vectors, factor), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_gradients_are_added_up_in_megatrons_buffer():
    weights = matrices(16, 8, gap=4)
    mains = torch.ones(EXPERTS, 16 * 8 + 32)
    for weight, main in zip(weights, mains, strict=True):
        weight.main_grad = main[: 16 * 8].view(16, 8)
    x, factor = torch.randn(TOKENS, 8), torch.randn(TOKENS, 16)
    for _ in range(2):
        grads = _grads(grouped_linear(x, groups(), weights), weights, factor)
    for weight, grad in zip(weights, grads, strict=True):
        torch.testing.assert_close(weight.main_grad, 1 + 2 * grad)
        assert weight.grad_added_to_main_grad
    assert (mains[:, 16 * 8 :] == 1).all()  # what lies between them is not touched


def test_gradients_of_scattered_buffers_are_left_to_their_owner():
    weights = matrices(16, 8)
    for weight in weights:
        weight.main_grad = torch.zeros(16, 8)
    x, factor = torch.randn(TOKENS, 8), torch.randn(TOKENS, 16)
    grads = _grads(grouped_linear(x, groups(), weights), weights, factor)
    assert any(grad.abs().max() > 0 for grad in grads)
    assert all((weight.main_grad == 0).all() for weight in weights)
    assert not any(hasattr(weight, "grad_added_to_main_grad") for weight in weights)


def test_frozen_experts_have_no_gradient():
    weights = [weight.requires_grad_(False) for weight in matrices(16, 8)]
    x = torch.randn(TOKENS, 8, requires_grad=True)
    grouped_linear(x, groups(), weights).sum().backward()
    assert x.grad is not None and all(weight.grad is None for weight in weights)


def _results(output, x, weights, factor):
    return [output.detach(), *_grads(output, [x, *weights], factor)]


def _grads(output, inputs, factor):
    return torch.autograd.grad((output * factor).sum(), inputs)
