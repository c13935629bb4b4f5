"""Losses of policy, SFT and critic over one packed micro-batch, each sum(loss_weights * token loss).

The loss of a step is the plain sum over its micro-batches and ranks; see `loss_weights` in
slime.core.dp_schedule. `importance_correction` corrects the policy loss for the mismatch between
inference engine and trainer: with the same weights the two compute slightly different probabilities.
Policy gradients are weighted by w = p_trainer / p_engine of the sampled tokens; w is bounded to
limit the variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from slime.algorithms.estimators import RECIPES, Estimator, KLKind, PgInputs, kl_estimate
from slime.core.dp_schedule import trained_rows
from slime.core.types import LossInputs, LossOutput, MetricSum, RolloutBatch

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]
Reducer = Callable[[torch.Tensor], torch.Tensor]  # token losses [T] -> their share of the loss []

_MAX_LOG_RATIO = 20.0


def policy_loss(
    inputs: LossInputs,
    *,
    estimator: Estimator = "grpo",
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: KLKind = "k1",
    use_unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    use_rollout_logprobs: bool = False,
    correction: Correction | None = None,
    reduce_pg: Reducer | None = None,
    opd_kl_coef: float = 0.0,
    cp_group: dist.ProcessGroup | None = None,
) -> LossOutput:
    """Return policy gradient + kl_loss_coef * KL - entropy_coef * entropy, and metrics.

    Ratios are relative to `old_log_probs`; if those are None (first step after generation), to the
    policy's own detached log-probs; with `use_rollout_logprobs`, to the engine's. `correction` and
    `reduce_pg` replace how the policy gradient is weighted and summed. For `opd_kl_coef` see
    `distilled`. Metrics are means weighted by the loss weights.
    """
    mask = inputs.loss_mask
    old = _old_log_probs(inputs, use_rollout_logprobs)
    log_ratio = _log_ratio(inputs.log_probs, old, mask)
    advantages = _required(inputs.advantages, "advantages")
    columns: dict[str, torch.Tensor] = {}
    if opd_kl_coef:
        teacher = _required(inputs.teacher_log_probs, "teacher_log_probs")
        columns["opd_kl"] = _log_ratio(old.detach(), teacher, mask)
        advantages = distilled(advantages, columns["opd_kl"], opd_kl_coef)
    pg, clipped = RECIPES[estimator].pg_loss(
        PgInputs(
            log_probs=inputs.log_probs * mask,
            log_ratio=log_ratio,
            advantages=advantages,
            low=eps_clip,
            high=eps_clip if eps_clip_high is None else eps_clip_high,
            dual=eps_clip_c,
            sequence_mean=partial(
                sequence_log_ratio,
                loss_mask=mask,
                cu_seqlens=inputs.cu_seqlens,
                mean=True,
                cp_group=cp_group,
            ),
        )
    )
    columns |= {"clip_fraction": clipped, "ppo_kl": -log_ratio}
    if correction is not None:
        pg, metrics = _correct(inputs, pg, correction, cp_group)
        columns |= metrics
    pg_loss = _weighted(inputs, pg) if reduce_pg is None else reduce_pg(pg)
    terms = {"pg_loss": pg_loss, **_penalties(inputs, log_ratio, kl_loss_type, use_unbiased_kl)}
    loss = pg_loss
    # Skip terms with coefficient 0: they would backpropagate zeros through all logits.
    for name, coefficient in (("kl_loss", kl_loss_coef), ("entropy", -entropy_coef)):
        if coefficient and name in terms:
            loss = loss + coefficient * terms[name]
    terms |= {name: _weighted(inputs, column) for name, column in columns.items()}
    return LossOutput(loss=loss, metrics=_metrics(inputs.loss_weights, {"loss": loss, **terms}))


def distilled(advantages: torch.Tensor, log_gap: torch.Tensor, opd_kl_coef: float) -> torch.Tensor:
    """Return A_t - opd_kl_coef * (log p_old - log p_teacher): on-policy distillation.

    `log_gap` is a one-token estimate of the reverse KL to the teacher; each token is penalized for
    its own (arXiv 2306.13649, 2306.08543; Lu and Thinking Machines Lab, "On-Policy Distillation",
    2025). It is added to the estimator's advantages; with equal rewards it is the only signal.
    """
    return advantages - opd_kl_coef * log_gap


def sft_loss(inputs: LossInputs) -> LossOutput:
    """Return the negative log-likelihood of the trained tokens."""
    loss = -_weighted(inputs, inputs.log_probs)
    terms = {"loss": loss}
    if inputs.entropy is not None:
        terms["entropy"] = _weighted(inputs, inputs.entropy)
    return LossOutput(loss=loss, metrics=_metrics(inputs.loss_weights, terms))


def value_loss(
    values: torch.Tensor,  # [T], by the critic being trained
    *,
    old_values: torch.Tensor,  # [T], by the critic before this rollout's steps, as used in GAE
    returns: torch.Tensor,  # [T]
    loss_weights: torch.Tensor,  # [T]
    value_clip: float,
) -> LossOutput:
    """Return half the squared error to the returns, clipped as in PPO's reference implementation.

    The loss is max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 with c = value_clip: once
    a value has moved more than c towards its return, its gradient is 0 for the rest of this rollout
    (arXiv 1707.06347; 2006.05990 measures the effect).
    """
    bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    loss = (loss_weights * torch.maximum(plain, clipped)).sum() / 2
    terms = {
        "loss": loss,
        "clip_fraction": (loss_weights * (clipped > plain)).sum(),
        "value": (loss_weights * values).sum(),
        "return": (loss_weights * returns).sum(),
    }
    return LossOutput(loss=loss, metrics=_metrics(loss_weights, terms))


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
    log_weight = torch.where(loss_mask > 0, (old_log_probs - rollout_log_probs).detach(), 0.0)
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
    rows = trained_rows(batch.schedule, len(batch))
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


def _penalties(
    inputs: LossInputs, log_ratio: torch.Tensor, kl_loss_type: KLKind, unbiased: bool
) -> dict[str, torch.Tensor]:
    """Return the KL to the reference and the entropy, each only if the batch has its column."""
    terms: dict[str, torch.Tensor] = {}
    if inputs.ref_log_probs is not None:
        mask = inputs.loss_mask
        kl = kl_estimate(inputs.log_probs * mask, inputs.ref_log_probs * mask, kl_loss_type)
        terms["kl_loss"] = _weighted(inputs, kl * log_ratio.exp() if unbiased else kl)
    if inputs.entropy is not None:
        terms["entropy"] = _weighted(inputs, inputs.entropy)
    return terms


def _correct(
    inputs: LossInputs,
    pg: torch.Tensor,
    correction: Correction,
    cp_group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    corrected = correction(
        pg_loss=pg,
        old_log_probs=_old_log_probs(inputs, False),
        rollout_log_probs=_required(inputs.rollout_log_probs, "rollout_log_probs"),
        loss_mask=inputs.loss_mask,
        cu_seqlens=inputs.cu_seqlens,
        cp_group=cp_group,
    )
    return torch.where(corrected.loss_mask > 0, corrected.pg_loss, 0.0), corrected.metrics


def _old_log_probs(inputs: LossInputs, use_rollout_logprobs: bool) -> torch.Tensor:
    if use_rollout_logprobs:
        return _required(inputs.rollout_log_probs, "rollout_log_probs")
    return inputs.log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs


def _log_ratio(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return clamped log(new / old); 0 at untrained tokens, even if an input is NaN there."""
    return torch.where(mask > 0, new - old, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _required(column: torch.Tensor | None, name: str) -> torch.Tensor:
    if column is None:
        raise ValueError(f"this loss needs the column {name}")
    return column


def _weighted(inputs: LossInputs, column: torch.Tensor) -> torch.Tensor:
    return (inputs.loss_weights * column).sum()


def _metrics(loss_weights: torch.Tensor, terms: dict[str, torch.Tensor]) -> dict[str, MetricSum]:
    """Return all metrics, read in one device-to-host transfer."""
    values = torch.stack([*terms.values(), loss_weights.sum()]).detach().tolist()
    return {
        name: MetricSum(total=total, count=values[-1])
        for name, total in zip(terms, values[:-1], strict=True)
    }
