"""Muon: orthogonalize a weight matrix's momentum by Newton-Schulz iterations before the update.

https://kellerjordan.github.io/posts/muon/, https://arxiv.org/abs/2502.16982. One iteration is the
polynomial aX + b(XX')X + c(XX')(XX')X, which drives all singular values of X towards 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

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
    turned = matrix.size(-2) > matrix.size(-1) if cut is None else cut[1] == 0
    x = matrix.mT if turned else matrix
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
    return x.mT if turned else x


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
