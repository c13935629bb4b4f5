"""Learning-rate schedules, and optimizer steps: the rate of each, its report, what stops it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from slime.backends.backend import StepResult
from slime.backends.fsdp_utils.optimizer import ShardedOptimizer
from slime.backends.optim import DECAY_STYLES, LrSchedule, lr_schedule, step_optimizer, warmup_steps
from slime.core.errors import ConfigError, UserError
from slime.core.types import MetricSum
from tests.args import make_args


def test_linear_example_of_the_docstring():
    schedule = LrSchedule(lr=1.0, min_lr=0.2, style="linear", warmup_steps=2, decay_steps=6)
    rates = [schedule.at(step) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_warm_up_rises_evenly_to_the_full_rate_and_loses_no_step(style):
    schedule = LrSchedule(lr=3.0, style=style, warmup_steps=4, decay_steps=100)
    assert [schedule.at(step) for step in range(4)] == pytest.approx([0.75, 1.5, 2.25, 3.0])


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_decay_never_rises_and_ends_at_the_minimum(style):
    schedule = LrSchedule(lr=1.0, min_lr=0.1, style=style, warmup_steps=3, decay_steps=50)
    rates = [schedule.at(step) for step in range(3, 60)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[-1] == rates[50 - 3] == 0.1
    assert rates[10] < 1.0


def test_cosine_is_halfway_in_the_middle():
    schedule = LrSchedule(lr=1.0, min_lr=0.2, style="cosine", warmup_steps=10, decay_steps=30)
    assert schedule.at(20) == pytest.approx(0.6)
    assert schedule.at(15) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_inverse_square_root_halves_when_the_step_quadruples():
    schedule = LrSchedule(
        lr=1.0, min_lr=0.3, style="inverse-square-root", warmup_steps=4, decay_steps=1000
    )
    assert schedule.at(16) == pytest.approx(0.5)
    assert schedule.at(64) == 0.3  # 0.25 is below the minimum


def test_inverse_square_root_without_warm_up_starts_at_the_full_rate():
    schedule = LrSchedule(lr=1.0, min_lr=0.1, style="inverse-square-root", decay_steps=1000)
    assert [schedule.at(step) for step in (0, 1, 4, 16)] == pytest.approx([1.0, 1.0, 0.5, 0.25])


def test_constant_stays():
    schedule = LrSchedule(lr=0.5, min_lr=0.1)
    assert {schedule.at(step) for step in (0, 1, 10**6)} == {0.5}


def test_warm_up_as_a_fraction_of_the_decay():
    assert warmup_steps(7, None, 100) == 7
    assert warmup_steps(7, 0.05, 100) == 5
    assert warmup_steps(0, 0.29, 100) == 29  # 0.29 * 100 is 28.999999999999996


@pytest.mark.parametrize(
    "fields",
    [
        {"style": "WSD"},
        {"style": "linear"},
        {"style": "linear", "decay_steps": 3, "warmup_steps": 4},
    ],
)
def test_impossible_schedules_are_refused(fields):
    with pytest.raises(ConfigError, match=r"--lr-decay-iters.*(WSD|decay steps)"):
        LrSchedule(lr=1.0, **fields)


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
