"""The result of one optimizer step, and the optimizer update shared by all backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slime.core.errors import UserError
from slime.core.train_batch import add_up
from slime.core.types import MetricSum


@dataclass(kw_only=True)
class StepResult:
    """Metrics and log-probs of one optimizer step on this rank."""

    metrics: dict[str, MetricSum] = field(default_factory=dict)
    log_probs: dict[int, np.ndarray] = field(default_factory=dict)  # row -> [R], before the step

    def add(self, metrics: dict[str, MetricSum]) -> None:
        self.metrics = add_up([self.metrics, metrics])


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
            f"{grad_norm}); the weights were left as they were. Lower --lr, or look at the samples "
            "with --save-debug-rollout-data"
        )
    result.add(
        {"grad_norm": MetricSum(total=grad_norm, count=1), "lr": MetricSum(total=lr, count=1)}
    )
    return result
