"""Per-token policy-gradient losses. Each returns losses [T] and a mask [T], 1 where clipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(kw_only=True, frozen=True)
class PgInputs:
    """Packed columns [T] and the clip range [1-low, 1+high] of the ratio x = p_new / p_old."""

    log_probs: torch.Tensor
    log_ratio: torch.Tensor  # log x, 0 at tokens that are not trained on
    advantages: torch.Tensor
    low: float
    high: float
    dual: float | None
    # Maps a column to its mean over each token's sequence, detached from the graph.
    sequence_mean: Callable[[torch.Tensor], torch.Tensor]


class PgLoss(Protocol):
    def __call__(self, inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]: ...


def ppo_clip(inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's clipped surrogate (arXiv 1707.06347), with DAPO's own upper bound (2503.14476).

    The loss is -min(x A, clip(x, 1-low, 1+high) A); dual clip (arXiv 1912.09729) limits it to at
    most -dual * A where A < 0.
    """
    return _clip(inputs, inputs.log_ratio)


def gspo(inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GSPO's loss (arXiv 2507.18071): the ratio is exp(mean log-ratio) of the sequence.

    The gradient flows through the token's own log-prob (the paper's GSPO-token, eq. 14), which is
    GSPO's gradient if advantages and loss weights are constant within the sequence.
    """
    own = inputs.log_ratio
    return _clip(inputs, inputs.sequence_mean(own) + (own - own.detach()))


def cispo(inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -sg(clip(x, 1-low, 1+high)) A log p (CISPO, arXiv 2506.13585); no token is dropped."""
    ratio = inputs.log_ratio.detach().exp()
    bounded = ratio.clamp(1 - inputs.low, 1 + inputs.high)
    loss = -bounded * inputs.advantages * inputs.log_probs
    return loss, (bounded != ratio).to(ratio.dtype)


def _clip(inputs: PgInputs, log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ratio, advantages = log_ratio.exp(), inputs.advantages
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - inputs.low, 1 + inputs.high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if inputs.dual is not None:
        ceiling = -inputs.dual * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return loss, clipped.to(loss.dtype)
