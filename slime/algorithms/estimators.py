"""The recipes of `--advantage-estimator`, their formulas, and the computation of advantages:

    rewards ─normalize_group_rewards─▶ scores ─compute_advantages─▶ advantages ─loss of a token─▶ policy_loss.py

`normalize_group_rewards` subtracts the baseline of each group and, for GRPO, divides by the standard
deviation; it needs all samples, so `slime/rollout/train_data.py` calls it before rows are distributed
over DP ranks. `compute_advantages` runs in the trainer and is per row, except `normalize`.
To add an estimator, write its function and add it to `RECIPES`; most need only one of the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from slime.core.dp_schedule import trained_rows
from slime.core.types import RolloutBatch

Estimator = Literal[
    "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]
KLKind = Literal["k1", "k2", "k3", "low_var_kl"]
Rows = list[np.ndarray]  # one entry per trained token of each row

_STD_EPS = 1e-6
_VAR_EPS = 1e-8
_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR = 10.0


class GroupBaseline(Protocol):
    """Subtracts a baseline of the group from its rewards; groups may differ in size.

    It maps rewards [N] and group numbers 0, 1, ... [N] to the scores [N] that advantages use.
    """

    def __call__(self, rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray: ...


def no_baseline(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return r: REINFORCE++ (arXiv 2501.03262) whitens over the batch, PPO has a critic."""
    return rewards


def mean_baseline(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return r - mean: REINFORCE++ with baseline (arXiv 2501.03262), Dr. GRPO (2503.20783)."""
    return rewards - (np.bincount(group, weights=rewards) / np.bincount(group))[group]


def mean_std_baseline(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return (r - mean) / (std + 1e-6), std over G-1 as torch.std: GRPO (arXiv 2402.03300).

    A group of one, or with equal rewards, gets 0. Without `std` it equals `mean_baseline`.
    """
    difference = mean_baseline(rewards, group, std=std)
    if not std:
        return difference
    variance = np.bincount(group, weights=difference**2) / _others(group)
    return difference / (np.sqrt(variance) + _STD_EPS)[group]


def leave_one_out(rewards: np.ndarray, group: np.ndarray, *, std: bool) -> np.ndarray:
    """Return r - mean of others = (r - mean) * G / (G-1), 0 if G = 1: RLOO (arXiv 2402.14740)."""
    return mean_baseline(rewards, group, std=std) * (np.bincount(group) / _others(group))[group]


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


# A policy-gradient loss returns the losses of tokens [T] and a mask [T], 1 where clipped.
PgLoss = Callable[[PgInputs], tuple[torch.Tensor, torch.Tensor]]


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

    baseline: GroupBaseline
    pg_loss: PgLoss = ppo_clip
    discounts: bool = False  # --gamma discounts the rewards of later tokens
    critic: bool = False  # advantages are GAE with a critic's values


RECIPES: dict[Estimator, Recipe] = {
    "grpo": Recipe(baseline=mean_std_baseline),
    "gspo": Recipe(baseline=mean_std_baseline, pg_loss=gspo),
    "cispo": Recipe(baseline=mean_std_baseline, pg_loss=cispo),
    "rloo": Recipe(baseline=leave_one_out),
    "reinforce_plus_plus": Recipe(baseline=no_baseline, discounts=True),
    "reinforce_plus_plus_baseline": Recipe(baseline=mean_baseline),
    "ppo": Recipe(baseline=no_baseline, discounts=True, critic=True),
}


def normalize_group_rewards(
    rewards: np.ndarray, group_indices: np.ndarray, *, estimator: Estimator, std: bool
) -> np.ndarray:
    """Return rewards relative to their group, using the baseline of `estimator`."""
    _, group = np.unique(np.asarray(group_indices), return_inverse=True)
    baseline = RECIPES[estimator].baseline
    return baseline(np.asarray(rewards, np.float64), group, std=std).astype(np.float32)


def compute_advantages(
    batch: RolloutBatch,
    *,
    estimator: Estimator,
    kl_coef: float = 0.0,
    kl_type: KLKind = "k1",
    gamma: float = 1.0,
    lambd: float = 1.0,
    normalize: bool = False,
    dp_group: dist.ProcessGroup | None = None,
) -> None:
    """Fill `batch.advantages` and `batch.returns`; both are 0 at tokens that are not trained on.

    The reward of a trained token is -kl_coef * KL estimate against the reference; the last one also
    gets the sample's reward. The return of a token is the sum of its own and all later rewards,
    discounted by `gamma` for reinforce_plus_plus and ppo. The advantage equals the return, except
    for ppo (see `gae`). Tokens that are not trained on (tool output) are skipped as if absent.
    `normalize` (--normalize-advantages) whitens advantages to mean 0, variance 1 over all trained
    tokens of the rollout, on all ranks of `dp_group`, each token with the same weight.
    """
    recipe = RECIPES[estimator]
    masks = [mask.astype(bool) for mask in batch.loss_masks]
    rewards = _token_rewards(batch, masks, kl_coef, kl_type)
    if recipe.critic:
        if batch.values is None:
            raise ValueError(f"estimator {estimator} needs the critic's values")
        values = [v[mask] for v, mask in zip(batch.values, masks, strict=True)]
        advantages, returns = gae(rewards, values, gamma=gamma, lambd=lambd)
    else:
        returns = _discount(rewards, gamma if recipe.discounts else 1.0)
        advantages = returns
    if normalize:
        advantages = _whiten(advantages, trained_rows(batch.schedule, len(batch)), dp_group)
    batch.advantages = _scatter(advantages, masks)
    batch.returns = _scatter(returns, masks)


def gae(rewards: Rows, values: Rows, *, gamma: float, lambd: float) -> tuple[Rows, Rows]:
    """Return generalized advantage estimates and returns of each row (GAE, arXiv 1506.02438).

    A_t = sum_k (gamma * lambd)^k d_{t+k} with d_t = r_t + gamma * V_{t+1} - V_t and V = 0 past the
    end. The return, which is the critic's regression target, is A_t + V_t.
    """
    deltas = [
        r + gamma * np.append(v[1:], 0.0)[: len(v)] - v
        for r, v in zip(rewards, values, strict=True)
    ]
    advantages = _discount(deltas, gamma * lambd)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


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


def _token_rewards(
    batch: RolloutBatch, masks: list[np.ndarray], kl_coef: float, kl_type: KLKind
) -> Rows:
    if kl_coef:
        ours = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
        if ours is None or batch.ref_log_probs is None:
            raise ValueError("a KL penalty needs the reference's log-probs and the policy's")
        rows = [
            -kl_coef * _kl(a[mask], b[mask], kl_type)
            for a, b, mask in zip(ours, batch.ref_log_probs, masks, strict=True)
        ]
    else:
        rows = [np.zeros(int(mask.sum())) for mask in masks]
    for row, reward in zip(rows, batch.rewards, strict=True):
        row[-1:] += reward  # a no-op for a row without trained tokens
    return rows


def _kl(ours: np.ndarray, reference: np.ndarray, kind: KLKind) -> np.ndarray:
    wide = np.stack([ours, reference]).astype(np.float64)
    return kl_estimate(*torch.from_numpy(wide), kind=kind).numpy()


def _discount(rows: Rows, factor: float) -> Rows:
    """Return y_t = x_t + factor * y_{t+1} for each row, vectorized over rows."""
    if factor == 1.0:
        return [np.cumsum(row[::-1])[::-1] for row in rows]
    from_end = np.zeros((max(len(row) for row in rows), len(rows)))
    for number, row in enumerate(rows):
        from_end[: len(row), number] = row[::-1]
    for t in range(1, len(from_end)):
        from_end[t] += factor * from_end[t - 1]
    return [from_end[: len(row), number][::-1] for number, row in enumerate(rows)]


def _whiten(rows: Rows, counted: list[int], group: dist.ProcessGroup | None) -> Rows:
    ours = np.concatenate([rows[number] for number in counted]) if counted else np.empty(0)
    count, total = _all_reduce([len(ours), ours.sum()], group)
    mean = total / max(count, 1.0)
    (squares,) = _all_reduce([np.square(ours - mean).sum()], group)
    scale = 1.0 / np.sqrt(squares / max(count, 1.0) + _VAR_EPS)
    return [(row - mean) * scale for row in rows]


def _all_reduce(values: list[float], group: dist.ProcessGroup | None) -> list[float]:
    if group is None:
        return values
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def _scatter(rows: Rows, masks: list[np.ndarray]) -> list[np.ndarray]:
    columns = []
    for row, mask in zip(rows, masks, strict=True):
        column = np.zeros(len(mask), np.float32)
        column[mask] = row
        columns.append(column)
    return columns
