"""What the optimizers of both trainers share: the step, learning rate, Muon.

Muon orthogonalizes a weight matrix's momentum by Newton-Schulz iterations before the update:
https://kellerjordan.github.io/posts/muon/, https://arxiv.org/abs/2502.16982. One iteration is the
polynomial aX + b(XX')X + c(XX')(XX')X, which drives all singular values of X towards 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from slime.backends.backend import StepResult
from slime.core.errors import ConfigError, UserError
from slime.core.types import MetricSum

if TYPE_CHECKING:
    from slime.config.arguments import Args


class Optimizer(Protocol):
    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        ...

    def step(self) -> float:
        """Update the weights and return the gradient norm; skip the update if it is not finite."""
        ...


def step_optimizer(
    optimizer: Optimizer, result: StepResult, rollout_id: int, step_id: int
) -> StepResult:
    """Step the optimizer with the accumulated gradients; raise UserError if they are not finite."""
    lr = optimizer.lr
    grad_norm = optimizer.step()
    if not math.isfinite(grad_norm):
        loss = f"loss {result.metrics['loss'].mean}, " if "loss" in result.metrics else ""
        raise UserError(
            f"rollout {rollout_id}, step {step_id}: the gradient is not finite ({loss}norm "
            f"{grad_norm}); the weights are unchanged. Lower --lr, or look at the samples "
            "with --save-debug-rollout-data"
        )
    result.add(
        {"grad_norm": MetricSum(total=grad_norm, count=1), "lr": MetricSum(total=lr, count=1)}
    )
    return result


DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A schedule whose `at(step)` is the learning rate of a step, counted from 0.

    Example: two warm-up steps to 1.0, then linear decay to 0.2 at step 6::

        step  0    1    2    3    4    5    6    7
        lr    0.5  1.0  1.0  0.8  0.6  0.4  0.2  0.2

    The warm-up starts above zero, so that no step is wasted. The inverse-square-root decay is
    max(min_lr, lr * sqrt(warmup / step)), and min_lr from `decay_steps` on.
    """

    lr: float
    min_lr: float = 0.0
    style: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0  # first step with min_lr; includes the warm-up

    def __post_init__(self) -> None:
        flags = "--lr-decay-style, --lr-decay-iters, --lr-warmup-iters"
        if self.style not in DECAY_STYLES:
            known = ", ".join(DECAY_STYLES)
            raise ConfigError(f"{flags}: decay style {self.style!r} is none of {known}")
        if self.style != "constant" and self.decay_steps < max(self.warmup_steps, 1):
            steps = f"{self.decay_steps} decay steps, {self.warmup_steps} of warm-up"
            raise ConfigError(f"{flags}: {steps}")

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.lr
        if step >= self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = 1 - progress if self.style == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.min_lr + (self.lr - self.min_lr) * share


def warmup_steps(iters: int, fraction: float | None, decay_steps: int | None) -> int:
    """Return the number of warm-up steps: `iters`, or `fraction` of the decay steps if given."""
    return iters if fraction is None else round(fraction * (decay_steps or 0))


def lr_schedule(args: Args) -> LrSchedule:
    """Return the schedule of the `--lr*` flags; raise ConfigError if they contradict each other."""
    warmup = warmup_steps(args.lr_warmup_iters, args.lr_warmup_fraction, args.lr_decay_iters)
    return LrSchedule(
        lr=args.lr,
        min_lr=args.min_lr,
        style=args.lr_decay_style,
        warmup_steps=warmup,
        decay_steps=args.lr_decay_iters or 0,
    )


Coefficients = Sequence[tuple[float, float, float]]

# Coefficients of torch.optim.Muon, the same in every iteration.
SIMPLE: Coefficients = ((3.4445, -4.7750, 2.0315),)
# Coefficients of megatron-core, one triple for each of five iterations.
QUINTIC: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_EPS = 1e-7


def orthogonalize(
    matrix: torch.Tensor,  # [..., R, C]
    *,
    steps: int,
    coefficients: Coefficients,
    dtype: torch.dtype = torch.bfloat16,
    cut: tuple[dist.ProcessGroup, int] | None = None,
) -> torch.Tensor:
    """Return approximately the nearest semi-orthogonal matrix, computed in `dtype`.

    `cut` is (group, dimension) if the ranks of a group hold shards of one matrix along that
    dimension: the Gram matrix of the other dimension is then all-reduced over the group.
    """
    transposed = matrix.size(-2) > matrix.size(-1) if cut is None else cut[1] == 0
    x = matrix.mT if transposed else matrix
    squares = x.float().square().sum(dim=(-2, -1), keepdim=True)
    if cut is not None:
        dist.all_reduce(squares, group=cut[0])
    x = (x / squares.sqrt().clamp_min(_EPS)).to(dtype)  # the largest singular value is at most 1
    for number in range(steps):
        a, b, c = coefficients[number % len(coefficients)]
        gram = x @ x.mT
        if cut is not None:
            dist.all_reduce(gram, group=cut[0])
        x = _multiply_add(x, _multiply_add(gram, gram, gram, b, c), x, a, 1.0)
    return x.mT if transposed else x


def muon_scale(rows: int, columns: int, mode: str) -> float:
    """Return the scale of an orthogonalized update of this shape; modes are megatron-core's."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    assert mode == "unit_rms_norm", mode
    return math.sqrt(rows / columns)


def blend_momentum(
    grad: torch.Tensor, momentum: torch.Tensor, beta: float, *, nesterov: bool
) -> torch.Tensor:
    """Update the momentum (EMA of gradients) in place; return the matrix to orthogonalize."""
    momentum.lerp_(grad, 1 - beta)
    return grad.lerp(momentum, beta) if nesterov else momentum


def _multiply_add(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    fused = torch.addmm if added.ndim == 2 else torch.baddbmm
    return fused(added, left, right, beta=beta, alpha=alpha)
