"""The critic's loss over one packed micro-batch: sum(loss_weights * token loss), like the policy loss."""

from __future__ import annotations

import torch

from slime.core.types import LossOutput, MetricSum


def value_loss(
    values: torch.Tensor,  # [T] of the critic that is being trained
    *,
    old_values: torch.Tensor,  # [T] of the critic that the advantages were computed with
    returns: torch.Tensor,  # [T]
    loss_weights: torch.Tensor,  # [T]
    value_clip: float,
) -> LossOutput:
    """Return half the squared error to the returns, clipped as in PPO.

    max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2: once a value has moved more than
    c = value_clip towards its return, there is nothing left to gain in this rollout (PPO's reference
    implementation; arXiv 1707.06347, and 2006.05990 on what it does).
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
