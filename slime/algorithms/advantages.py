"""Turn rewards into the advantage of each response token.

`normalize_group_rewards` compares rewards within their group; it needs all samples, so it runs
before rows are distributed over DP ranks. `compute_advantages` runs in the trainer and is per row.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from slime.algorithms.estimators import RECIPES, Estimator, KLKind, kl_estimate
from slime.core.dp_schedule import counted_rows
from slime.core.types import RolloutBatch

Rows = list[np.ndarray]  # one entry per trained token of each row

_VAR_EPS = 1e-8


def normalize_group_rewards(
    rewards: np.ndarray, group_indices: np.ndarray, *, estimator: Estimator, std: bool
) -> np.ndarray:
    """Return rewards relative to their group, using the baseline of `estimator`."""
    _, group = np.unique(np.asarray(group_indices), return_inverse=True)
    compare = RECIPES[estimator].compare
    return compare(np.asarray(rewards, np.float64), group, std=std).astype(np.float32)


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
    `normalize` whitens advantages to mean 0, variance 1 over all trained tokens of `dp_group`.
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
        advantages = _whiten(advantages, counted_rows(batch.schedule, len(batch)), dp_group)
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
