"""Draws tokens by the kernels, and by plain operations where a request asks for more than they do."""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.kernels.interface import DrawSettings, Kernels
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import SamplingRows


def make_settings(num_rows: int, device: torch.device) -> DrawSettings:
    return DrawSettings(
        temperatures=torch.ones(num_rows, dtype=torch.float32, device=device),
        seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
        last_tokens=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def note_settings(settings: DrawSettings, requests: list[Request]) -> None:
    """Of requests that draw their first token in the rows they have."""
    device = settings.seeds.device
    rows = torch.tensor([request.row for request in requests])
    params = [request.params for request in requests]
    temperatures = torch.tensor([-p.scale if p.greedy else p.scale for p in params])
    seeds = torch.from_numpy(np.array([r.seed for r in requests], np.uint64).view(np.int64))
    if device.type == "cuda":
        rows, temperatures, seeds = (
            x.pin_memory().to(device, non_blocking=True) for x in (rows, temperatures, seeds)
        )
    settings.temperatures[rows] = temperatures
    settings.seeds[rows] = seeds


def barred_ends(requests: list[Request], positions: list[int]) -> np.ndarray | None:
    """[R, B] int32: tokens that would end a request before its minimum length, filled up with -1."""
    ends: dict[int, list[int]] = {}
    for i, (request, position) in enumerate(zip(requests, positions, strict=True)):
        params = request.params
        if position + 1 - request.prompt_len < params.min_new_tokens:
            ends[i] = list(request.eos_ids | params.stop_token_ids)
    width = max(map(len, ends.values()), default=0)
    if not width:
        return None
    barred = np.full((len(requests), width), -1, np.int32)
    for i, tokens in ends.items():
        barred[i, : len(tokens)] = tokens
    return barred


def draw_special(
    logits: torch.Tensor,  # [R, V]
    requests: list[Request],
    tokens: torch.Tensor,  # [R], written to
    log_probs: torch.Tensor,
    settings: DrawSettings,
    positions: np.ndarray,  # [R], of the tokens before those to draw
    *,
    ends_barred: bool = False,
) -> bool:
    """Draw again for special requests; whether there were any.

    `ends_barred`: nothing that `barred_ends` names was drawn, so a minimum length alone is not special.
    """
    special = [
        i
        for i, request in enumerate(requests)
        if (request.params.reshaped if ends_barred else request.params.special)
    ]
    if not special:
        return False
    chosen = [requests[i] for i in special]
    index = torch.tensor(special, device=logits.device)
    following = positions[special].astype(np.int64) + 1
    drawn, values = SamplingRows(chosen, logits.device).draw(logits[index], following)
    tokens[index] = drawn.to(tokens.dtype)
    log_probs[index] = values
    rows = torch.tensor([request.row for request in chosen], device=logits.device)
    settings.last_tokens[rows] = drawn.to(settings.last_tokens.dtype)
    return True


def draw_all(
    kernels: Kernels,
    logits: torch.Tensor,
    requests: list[Request],
    rows: torch.Tensor,
    positions: torch.Tensor,
    settings: DrawSettings,
    host_positions: np.ndarray,  # `positions`, on the host
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Tokens, log-probs, and whether any request was special."""
    tokens, log_probs = kernels.draw(logits, rows, positions, settings)
    special = draw_special(logits, requests, tokens, log_probs, settings, host_positions)
    return tokens, log_probs, special
