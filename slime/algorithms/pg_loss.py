"""Policy-gradient losses per token. Each returns the losses and a mask that is 1 where the ratio was clipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(kw_only=True, frozen=True)
class PgInputs:
    """Packed columns [T] and the clip range [1-low, 1+high] of the ratio x of new to old probability."""

    log_probs: torch.Tensor
    log_ratio: torch.Tensor  # log x, 0 where nothing is trained
    advantages: torch.Tensor
    low: float
    high: float
    dual: float | None
    # Mean over the sequence of each token, detached from the graph.
    sequence_mean: Callable[[torch.Tensor], torch.Tensor]


class PgLoss(Protocol):
    def __call__(self, inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]: ...


def ppo_clip(inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic surrogate (arXiv 1707.06347), with DAPO's own upper bound (2503.14476).

    -min(x A, clip(x, 1-low, 1+high) A); dual clip (arXiv 1912.09729) keeps it from exceeding
    -dual * A where A < 0.
    """
    return _clip(inputs, inputs.log_ratio)


def gspo(inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO (arXiv 2507.18071): every token has the ratio of its sequence, exp(mean of log-ratios).

    The gradient goes through the token's own log-prob (the paper's GSPO-token, eq. 14), which is
    GSPO's gradient wherever advantages and weights are equal within the sequence.
    """
    own = inputs.log_ratio
    return _clip(inputs, inputs.sequence_mean(own) + (own - own.detach()))


def cispo(inputs: PgInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(x, 1-low, 1+high)) A log p; no token is dropped."""
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
