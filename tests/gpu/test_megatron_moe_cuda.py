"""Megatron's experts computed together on one GPU, against a loop over experts.

Tolerances: fp32 2e-4 of the largest entry of a tensor. In bf16 every product is rounded to 8 bits, 2**-9 of
itself on average, and a gradient passes three of them: 1e-2 of a tensor's norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slime.backends.kernels.grouped_linear import expert_rows, grouped_linear, make_groups
from slime.weights.buckets import hf_views
from tests.fsdp import Case, train_naively

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from tests.megatron import (  # noqa: E402
    DIST_OPT,
    first_gradient,
    megatron_args,
    my_rows,
    start_actor,
)
from tests.tiny import make_tiny_checkpoint  # noqa: E402

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the norm
SIZES = [100, 0, 1, 37, 0, 250]  # tokens of each expert


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("even", [True, False], ids=["in one buffer", "apart"])
def test_linear_maps_equal_the_loop(dtype: torch.dtype, even: bool):
    torch.manual_seed(0)
    stacked = torch.randn(len(SIZES), 192, 128, device="cuda", dtype=dtype) / 8
    weights = [(w if even else w.clone()).detach().requires_grad_() for w in stacked]
    x = torch.randn(sum(SIZES), 128, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn(sum(SIZES), 192, device="cuda", dtype=dtype)
    dirty = torch.full((len(SIZES) * 192 * 128,), torch.nan, device="cuda", dtype=dtype)
    del dirty  # what nobody writes is not zero by accident
    found = grouped_linear(x, make_groups(SIZES, x.device), weights)
    grads = torch.autograd.grad(found, [x, *weights], grad)
    exact = [value.detach().double().requires_grad_() for value in (x, *weights)]
    parts = zip(exact[0].split(SIZES), exact[1:], strict=True)
    looped = torch.cat([F.linear(part, weight) for part, weight in parts])
    wanted = torch.autograd.grad(looped, exact, grad.double())
    for mine, other in zip((found, *grads), (looped, *wanted), strict=True):
        _assert_near(mine, other, LIMIT[dtype])


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_biases_equal_the_loop(dtype: torch.dtype):
    torch.manual_seed(0)
    biases = [torch.randn(72, device="cuda", dtype=dtype, requires_grad=True) for _ in SIZES]
    grad = torch.randn(sum(SIZES), 72, device="cuda", dtype=dtype)
    rows = expert_rows(make_groups(SIZES, grad.device), biases)
    parts = zip(biases, SIZES, strict=True)
    assert torch.equal(rows, torch.cat([bias.expand(size, -1) for bias, size in parts]))
    grads = torch.autograd.grad(rows, biases, grad)
    for mine, part in zip(grads, grad.double().split(SIZES), strict=True):
        _assert_near(mine, part.sum(0), LIMIT[dtype])


@pytest.mark.parametrize("optimizer", [{}, DIST_OPT], ids=["plain", "distributed optimizer"])
def test_fp32_gradients_of_all_experts_are_those_of_the_naive_loop(
    tmp_path: Path, optimizer: dict[str, Any]
):
    """The distributed optimizer holds the experts' matrices in one buffer, where they are used."""
    model = make_tiny_checkpoint(tmp_path / "m", "qwen3_moe", weight_scale=3.0)
    case = Case(model=str(model), flags={"fp32": True, "micro_batch_size": 4})
    found = first_gradient(start_actor(megatron_args(case, 1, optimizer), 0, 1))
    expected = dict(hf_views(train_naively(case).grads.items(), model_type="qwen3_moe"))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = grad.abs().max().clamp(min=1e-9)
        torch.testing.assert_close(found[name].cpu() / scale, grad / scale, rtol=0, atol=2e-4)


@pytest.mark.parametrize("optimizer", [{}, DIST_OPT], ids=["plain", "distributed optimizer"])
def test_bf16_experts_of_a_model_equal_the_loop(tmp_path: Path, optimizer: dict[str, Any]):
    """Output and gradients of one layer's experts, in Megatron's gradient buffer, for given tokens."""
    model = make_tiny_checkpoint(tmp_path / "m", "qwen3_moe", weight_scale=10.0, num_experts=8)
    local = {"transformer_impl": "local"}
    args = megatron_args(Case(model=str(model)), 1, optimizer, local, bf16=True)
    actor = start_actor(args, 0, 1)
    experts = actor.chunks[0].decoder.layers[1].mlp.experts
    actor.optimizer.zero_grad()
    sizes = [40, 0, 3, 128, 1, 0, 17, 64]
    torch.manual_seed(0)
    hidden = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(sum(sizes), device="cuda", requires_grad=True)
    grad = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16)
    output, _ = experts(hidden, torch.tensor(sizes), probs)
    output.backward(grad)
    mlps = [experts.local_experts[number] for number in range(len(sizes))]
    params = [p for mlp in mlps for p in (mlp.linear_fc1.weight, mlp.linear_fc2.weight)]
    exact = [value.detach().double().requires_grad_() for value in (hidden, probs, *params)]
    looped = _loop(exact[0], exact[1], exact[2:], sizes)
    wanted = torch.autograd.grad(looped, exact, grad.double())
    found = [hidden.grad, probs.grad, *(param.main_grad for param in params)]
    for mine, other in zip((output, *found), (looped, *wanted), strict=True):
        _assert_near(mine, other, 2e-2)  # two maps and an activation


def test_a_bf16_model_with_experts_learns(tmp_path: Path):
    """Many steps on the same rows raise the log-probs of what was rewarded."""
    model = make_tiny_checkpoint(tmp_path / "m", "qwen3_moe", weight_scale=3.0, num_experts=16)
    case = Case(model=str(model), flags={"micro_batch_size": 4})
    actor = start_actor(megatron_args(case, 1, DIST_OPT, bf16=True), 0, 1)
    before = _rewarded(actor)
    for step in range(6):
        metrics = actor.train(step, my_rows(actor, 0)).metrics
        assert 0 < metrics["train/grad_norm"] < 1e4
    assert _rewarded(actor) > before


def _rewarded(actor: Any) -> float:
    batch = my_rows(actor, 0)
    rows = zip(actor.log_probs(batch, "actor"), batch.loss_masks, batch.rewards, strict=True)
    return float(sum((values * mask).sum() * reward for values, mask, reward in rows))


def _loop(
    hidden: torch.Tensor, probs: torch.Tensor, params: list[torch.Tensor], sizes: list[int]
) -> torch.Tensor:
    outputs = []
    for number, (x, p) in enumerate(zip(hidden.split(sizes), probs.split(sizes), strict=True)):
        gate, up = F.linear(x, params[2 * number]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up * p[:, None], params[2 * number + 1]))
    return torch.cat(outputs)


def _assert_near(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    assert torch.isfinite(found).all()
    if wanted.norm() == 0:
        assert found.norm() == 0
        return
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error < limit, f"off by {error:.1e}"
