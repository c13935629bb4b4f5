"""The critic's loss over one packed micro-batch: sum(loss_weights * token loss)."""

from __future__ import annotations

import torch

from slime.core.types import LossOutput, MetricSum


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
    totals = torch.stack([*terms.values(), loss_weights.sum()]).detach().tolist()
    metrics = {
        name: MetricSum(total=total, count=totals[-1])
        for name, total in zip(terms, totals[:-1], strict=True)
    }
    return LossOutput(loss=loss, metrics=metrics)
