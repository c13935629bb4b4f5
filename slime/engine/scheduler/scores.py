"""Log-probs of prompt tokens."""

from __future__ import annotations

import torch

from slime.engine.scheduler.request import Request

_ROWS = 512  # computed at a time


def score(
    logits: torch.Tensor, requests: list[Request], positions: list[int]
) -> list[tuple[Request, float]]:
    """Row i of `logits` came from position i of request i; the log-prob of the prompt token after it."""
    targets = [r.token_ids[p + 1] for r, p in zip(requests, positions, strict=True)]
    values: list[float] = []
    for start in range(0, len(targets), _ROWS):
        part = logits[start : start + _ROWS].float()
        index = torch.tensor(targets[start : start + _ROWS], device=part.device).unsqueeze(1)
        values += torch.log_softmax(part, dim=-1).gather(1, index).squeeze(1).tolist()
    return list(zip(requests, values, strict=True))
