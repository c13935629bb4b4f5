"""Reward baselines within a group: all samples with the same group index; sizes may differ."""

from __future__ import annotations

from typing import Protocol

import numpy as np

_STD_EPS = 1e-6


class Compare(Protocol):
    """Map rewards [N] and group numbers 0, 1, ... [N] to the scores [N] that advantages use."""

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


def _others(group: np.ndarray) -> np.ndarray:
    return np.maximum(np.bincount(group) - 1, 1)
