"""Sampling on the fast path: by the kernels, and in torch for requests with parameters they lack."""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.kernels.interface import Kernels, SamplingState
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import BatchSampler


def make_sampling_state(num_rows: int, device: torch.device) -> SamplingState:
    return SamplingState(
        temperatures=torch.ones(num_rows, dtype=torch.float32, device=device),
        seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
        last_tokens=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def set_sampling_state(state: SamplingState, requests: list[Request]) -> None:
    """Write the parameters of requests that sample their first token to their rows."""
    device = state.seeds.device
    rows = torch.tensor([request.row for request in requests])
    params = [request.params for request in requests]
    temperatures = torch.tensor([-p.scale if p.greedy else p.scale for p in params])
    seeds = torch.from_numpy(np.array([r.seed for r in requests], np.uint64).view(np.int64))
    if device.type == "cuda":
        rows, temperatures, seeds = (
            x.pin_memory().to(device, non_blocking=True) for x in (rows, temperatures, seeds)
        )
    state.temperatures[rows] = temperatures
    state.seeds[rows] = seeds


def forbidden_ends(requests: list[Request], positions: list[int]) -> np.ndarray | None:
    """Return [R, B] int32, the tokens that would end a request before min_new_tokens, padded with -1."""
    ends: dict[int, list[int]] = {}
    for i, (request, position) in enumerate(zip(requests, positions, strict=True)):
        params = request.params
        if position + 1 - request.prompt_len < params.min_new_tokens:
            ends[i] = list(request.eos_ids | params.stop_token_ids)
    width = max(map(len, ends.values()), default=0)
    if not width:
        return None
    forbidden = np.full((len(requests), width), -1, np.int32)
    for i, tokens in ends.items():
        forbidden[i, : len(tokens)] = tokens
    return forbidden


def sample_special(
    logits: torch.Tensor,  # [R, V]
    requests: list[Request],
    tokens: torch.Tensor,  # [R], written to
    log_probs: torch.Tensor,
    state: SamplingState,
    positions: np.ndarray,  # [R], of the tokens before those to sample
    *,
    ends_forbidden: bool = False,
) -> bool:
    """Sample again, in torch, for requests with special parameters; return whether there were any.

    With `ends_forbidden` the kernel has applied `forbidden_ends`, so min_new_tokens alone is not special.
    """
    special = [
        i
        for i, request in enumerate(requests)
        if (request.params.reshaped if ends_forbidden else request.params.special)
    ]
    if not special:
        return False
    chosen = [requests[i] for i in special]
    index = torch.tensor(special, device=logits.device)
    following = positions[special].astype(np.int64) + 1
    sampled, values = BatchSampler(chosen, logits.device).sample(logits[index], following)
    tokens[index] = sampled.to(tokens.dtype)
    log_probs[index] = values
    rows = torch.tensor([request.row for request in chosen], device=logits.device)
    state.last_tokens[rows] = sampled.to(state.last_tokens.dtype)
    return True


def sample_all(
    kernels: Kernels,
    logits: torch.Tensor,
    requests: list[Request],
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    host_positions: np.ndarray,  # `positions`, on the host
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return tokens, log-probs, and whether any request had special parameters."""
    tokens, log_probs = kernels.sample(logits, rows, positions, state)
    special = sample_special(logits, requests, tokens, log_probs, state, host_positions)
    return tokens, log_probs, special
