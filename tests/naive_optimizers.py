"""Optimizers written out from their definitions, on whole tensors in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]
SIMPLE = [(3.4445, -4.7750, 2.0315)]
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def newton_schulz(matrix: torch.Tensor, steps: int, coefficients: list) -> torch.Tensor:
    """By its effect on the singular values, which is all that the iteration changes."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for number in range(steps):
        a, b, c = coefficients[number % len(coefficients)]
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


@dataclass
class NaiveMuon:
    """Muon for the tensors `matrix` names, AdamW for the others; `orthogonal` is Muon's update."""

    matrix: Callable[[str], bool]
    orthogonal: Callable[[str, torch.Tensor], torch.Tensor]
    decay: float
    beta: float = 0.95
    nesterov: bool = False
    eps: float = 1e-8
    state: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    steps: int = 0

    def step(self, weights: Weights, grads: Weights, lr: float, clip: float) -> None:
        self.steps += 1
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        factor = min(1.0, clip / (norm + 1e-6))
        for name, weight in weights.items():
            grad = grads[name].double() * factor
            kept = self.state.setdefault(name, [torch.zeros_like(grad) for _ in range(2)])
            if self.matrix(name):
                kept[0] = self.beta * kept[0] + (1 - self.beta) * grad
                ahead = self.beta * kept[0] + (1 - self.beta) * grad
                update = self.orthogonal(name, ahead if self.nesterov else kept[0])
            else:
                kept[0] = 0.9 * kept[0] + 0.1 * grad
                kept[1] = 0.999 * kept[1] + 0.001 * grad**2
                mean = kept[0] / (1 - 0.9**self.steps)
                update = mean / ((kept[1] / (1 - 0.999**self.steps)).sqrt() + self.eps)
            decay = self.decay if weight.ndim > 1 else 0.0
            weights[name] = weight.double() * (1 - lr * decay) - lr * update


def relative_error(found: torch.Tensor, wanted: torch.Tensor, start: torch.Tensor) -> float:
    """Of what was learnt, as a share of it."""
    learnt = (wanted.double() - start.double()).norm()
    return float((found.double() - wanted.double()).norm() / learnt)
