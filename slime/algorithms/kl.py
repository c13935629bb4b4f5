"""Per-token estimates of KL(policy || reference) at tokens that were sampled from the policy."""

from __future__ import annotations

from typing import Literal

import torch

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR = 10.0


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
