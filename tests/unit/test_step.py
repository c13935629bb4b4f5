"""One optimizer step after the other: the rate each is taken at, what it reports, what stops it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from slime.backends.backend import StepResult
from slime.backends.fsdp_utils.optimizer import ShardedOptimizer
from slime.backends.optim import lr_schedule, step_optimizer
from slime.core.errors import UserError
from slime.core.types import MetricSum
from tests.args import make_args

RUN = {"num_rollout": 8, "lr": 0.1, "min_lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}
FLAGS = {
    "linear": {"lr_decay_style": "linear", "lr_warmup_iters": 2},
    "cosine": {"lr_decay_style": "cosine", "lr_warmup_fraction": 0.25},
    "short": {"lr_decay_style": "linear", "lr_decay_iters": 4},
    "constant": {"lr_decay_style": "constant", "lr_warmup_iters": 3},
}


def rate(name: str, step: int) -> float:
    """Of eight steps, counted from 0, by the words of the flags."""
    if name == "constant":
        return 0.1 * min((step + 1) / 3, 1)
    if name == "short":
        return 0.1 - 0.08 * min(step / 4, 1)
    if step < 2:
        return 0.1 * (step + 1) / 2
    gone = (step - 2) / 6
    return 0.02 + 0.08 * (1 - gone if name == "linear" else (1 + math.cos(math.pi * gone)) / 2)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FLAGS)
def test_flags_become_the_schedule(name):
    schedule = lr_schedule(make_args(**RUN, **FLAGS[name]))
    expected = [rate(name, step) for step in range(8)]
    assert [schedule.at(step) for step in range(8)] == pytest.approx(expected)


@pytest.mark.parametrize("name", FLAGS)
def test_each_step_is_taken_and_reported_at_its_own_rate(name, one_rank):
    """Against AdamW of torch, told the rate of every step."""
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(3, 2, generator=generator).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    args = make_args(**RUN, **FLAGS[name])
    optimizer = ShardedOptimizer(args, {"w": ours}, set())
    betas = (args.adam_beta1, args.adam_beta2)
    adam = torch.optim.AdamW([theirs], betas=betas, eps=args.adam_eps, weight_decay=0.1)
    for step in range(8):
        grad = torch.randn(3, 2, generator=generator)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        adam.param_groups[0]["lr"] = rate(name, step)
        adam.step()
        result = step_optimizer(optimizer, StepResult(), 0, step)
        torch.testing.assert_close(ours, theirs)
        assert result.metrics["lr"].mean == pytest.approx(rate(name, step))
        assert result.metrics["grad_norm"].mean == pytest.approx(grad.norm().item())


def test_a_step_adds_to_what_its_micro_batches_left(one_rank):
    param = torch.ones(2, requires_grad=True)
    param.grad = torch.tensor([3.0, 4.0])
    result = StepResult()
    result.add({"loss": MetricSum(total=6, count=3)})
    result.add({"loss": MetricSum(total=2, count=1)})
    done = step_optimizer(ShardedOptimizer(make_args(**RUN), {"w": param}, set()), result, 0, 0)
    assert done.metrics["loss"].mean == 2.0
    assert done.metrics["grad_norm"] == MetricSum(total=5.0, count=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_gradient_stops_the_run_and_leaves_the_weights(bad, one_rank):
    param = torch.ones(2, requires_grad=True)
    param.grad = torch.tensor([0.5, bad])
    optimizer = ShardedOptimizer(make_args(**RUN), {"w": param}, set())
    with pytest.raises(UserError, match="rollout 3, step 1: the gradient is not finite"):
        step_optimizer(optimizer, StepResult(), 3, 1)
    assert param.tolist() == [1.0, 1.0] and optimizer.num_steps == 0
