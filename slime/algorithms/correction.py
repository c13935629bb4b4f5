"""Importance-sampling correction for the mismatch between inference engine and trainer.

With the same weights the two compute slightly different probabilities. Policy gradients are
weighted by w = p_trainer / p_engine of the sampled tokens; w is bounded to limit the variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from slime.core.dp_schedule import counted_rows
from slime.core.types import MetricSum, RolloutBatch

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]

_MAX_LOG_RATIO = 20.0


@dataclass(kw_only=True)
class Corrected:
    """Per-token policy-gradient loss after correction; tokens with mask 0 are excluded."""

    pg_loss: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T]
    metrics: dict[str, torch.Tensor]  # name -> [T], averaged with the loss weights


class Correction(Protocol):
    """Signature of the correction in `policy_loss`, e.g. a partial of `importance_correction`."""

    def __call__(
        self,
        *,
        pg_loss: torch.Tensor,
        old_log_probs: torch.Tensor,
        rollout_log_probs: torch.Tensor,
        loss_mask: torch.Tensor,
        cu_seqlens: torch.Tensor,
        cp_group: dist.ProcessGroup | None,
    ) -> Corrected: ...


def importance_correction(
    *,
    pg_loss: torch.Tensor,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cp_group: dist.ProcessGroup | None = None,
    level: Level = "token",
    mode: Mode = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> Corrected:
    """Multiply each token's loss by a bounded importance weight, which is detached from the graph.

    The weight is that of the token, of its whole sequence (product over trained tokens) or the
    geometric mean over the sequence. `truncate` clips it to [low, high] (TIS, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", Yao et al. 2025); `mask` drops tokens
    outside [low, high] (IcePop at token level, masked importance sampling at sequence level).
    """
    log_weight = (old_log_probs - rollout_log_probs).detach() * loss_mask
    if level != "token":
        log_weight = sequence_log_ratio(
            log_weight, loss_mask, cu_seqlens, mean=level == "geometric", cp_group=cp_group
        )
    weight = log_weight.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    outside = (weight < low) | (weight > high)
    metrics = {"tis": weight, "tis_clip_fraction": outside.to(weight.dtype)}
    if mode == "truncate":
        return Corrected(
            pg_loss=pg_loss * weight.clamp(low, high), loss_mask=loss_mask, metrics=metrics
        )
    return Corrected(pg_loss=pg_loss * weight, loss_mask=loss_mask * ~outside, metrics=metrics)


def sequence_log_ratio(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    mean: bool,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return at each token the sum or mean of log_ratio over its sequence's trained tokens: [T].

    Under context parallelism the sums are all-reduced over `cp_group`. The result is detached.
    """
    lens = cu_seqlens.diff()
    sequence = torch.repeat_interleave(lens, output_size=len(log_ratio))
    columns = torch.stack([log_ratio.detach() * loss_mask, loss_mask.to(log_ratio.dtype)], dim=1)
    sums = columns.new_zeros(len(lens), 2).index_add_(0, sequence, columns)
    if cp_group is not None:
        dist.all_reduce(sums, group=cp_group)
    total, count = sums.unbind(1)
    return (total / count.clamp(min=1) if mean else total)[sequence]


def mismatch_metrics(
    batch: RolloutBatch, *, breakdown: bool = False
) -> tuple[dict[str, MetricSum], dict[str, float]]:
    """Return how far the trainer's log-probs are from the engine's: means as sums, and a maximum.

    With d = trainer - engine over the trained tokens of this rank's rows: the mean |d|, the maximum
    |d| and the k3 estimate of KL(engine || trainer). `breakdown` adds k1 = -d, the mean importance
    weight exp(d), and the mean negative log-prob of each side.
    """
    if batch.old_log_probs is None or batch.rollout_log_probs is None:
        return {}, {}
    rows = counted_rows(batch.schedule, len(batch))
    columns = (batch.old_log_probs, batch.rollout_log_probs, batch.loss_masks)
    old, rollout, mask = (
        np.concatenate([column[r] for r in rows]) if rows else np.empty(0) for column in columns
    )
    old, rollout = old[mask > 0].astype(np.float64), rollout[mask > 0].astype(np.float64)
    gap = old - rollout
    means = {"log_prob_gap_mean": np.abs(gap), "mismatch_kl": np.expm1(gap) - gap}
    if breakdown:
        means["mismatch_k1"] = -gap
        means["mismatch_weight"] = np.exp(gap)
        means["mismatch_train_nll"] = -old
        means["mismatch_rollout_nll"] = -rollout
    sums = {k: MetricSum(total=float(v.sum()), count=len(v)) for k, v in means.items()}
    return sums, {"log_prob_gap_max": float(np.abs(gap).max(initial=0.0))}
