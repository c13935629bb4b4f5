"""The recipes of `--advantage-estimator`, and the formulas that they are made of:

    rewards ─baseline of the group─▶ scores ─advantages.py─▶ advantages ─loss of a token─▶ policy_loss.py

To add an estimator, write its function and add it to `RECIPES`; most need only one of the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

Estimator = Literal[
    "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]
KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

_STD_EPS = 1e-6
_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR = 10.0


class Compare(Protocol):
    """A reward baseline within a group: all samples with the same group index; sizes may differ.

    It maps rewards [N] and group numbers 0, 1, ... [N] to the scores [N] that advantages use.
    """

    def __call__(self, rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray: ...


def as_they_are(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return r: REINFORCE++ (arXiv 2501.03262) has a batch baseline, PPO that of a critic."""
    return rewards


def centred(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return r - mean: REINFORCE++ with baseline (arXiv 2501.03262), Dr. GRPO (2503.20783)."""
    return rewards - (np.bincount(group, weights=rewards) / np.bincount(group))[group]


def scaled(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return (r - mean) / (std + 1e-6), std over G-1 as torch.std: GRPO (arXiv 2402.03300).

    A group of one gets 0. Without `std` it equals `centred`.
    """
    difference = centred(rewards, group, std=std)
    if not std:
        return difference
    variance = np.bincount(group, weights=difference**2) / _others(group)
    return difference / (np.sqrt(variance) + _STD_EPS)[group]


def leave_one_out(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return r - mean of others = (r - mean) * G / (G-1), 0 if G = 1: RLOO (arXiv 2402.14740)."""
    return centred(rewards, group, std=std) * (np.bincount(group) / _others(group))[group]


def overlong_penalty(
    response_lens: np.ndarray, *, max_response_len: int, buffer_len: int, factor: float
) -> np.ndarray:
    """Return DAPO's penalty on the rewards of long responses (arXiv 2503.14476, eq. 13).

    It is 0 up to max_response_len - buffer_len tokens, then falls linearly to -factor at the limit.
    """
    excess = np.asarray(response_lens, np.float64) - (max_response_len - buffer_len)
    return (-np.clip(excess / buffer_len, 0.0, 1.0) * factor).astype(np.float32)


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
    """A per-token policy-gradient loss: losses [T] and a mask [T], 1 where clipped."""

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


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLKind) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) at each token (Schulman 2020, "Approximating KL").

    With d = log p - log p_ref:  k1 = d, unbiased, any sign;  k2 = d^2 / 2, biased, low variance;
    k3 = exp(-d) - 1 + d, unbiased, never negative. `low_var_kl` is k3 clamped to at most 10.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind not in ("k3", "low_var_kl"):
        raise ValueError(f"unknown KL estimate {kind!r}: one of k1, k2, k3, low_var_kl")
    difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    k3 = torch.expm1(-difference) + difference
    return k3 if kind == "k3" else k3.clamp(max=_MAX_LOW_VAR)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The functions and options with which one estimator turns rewards into a policy loss."""

    compare: Compare
    pg_loss: PgLoss = ppo_clip
    discounts: bool = False  # --gamma discounts the rewards of later tokens
    critic: bool = False  # advantages are GAE with a critic's values


RECIPES: dict[Estimator, Recipe] = {
    "grpo": Recipe(compare=scaled),
    "gspo": Recipe(compare=scaled, pg_loss=gspo),
    "cispo": Recipe(compare=scaled, pg_loss=cispo),
    "rloo": Recipe(compare=leave_one_out),
    "reinforce_plus_plus": Recipe(compare=as_they_are, discounts=True),
    "reinforce_plus_plus_baseline": Recipe(compare=centred),
    "ppo": Recipe(compare=as_they_are, discounts=True, critic=True),
}


def _others(group: np.ndarray) -> np.ndarray:
    return np.maximum(np.bincount(group) - 1, 1)


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
