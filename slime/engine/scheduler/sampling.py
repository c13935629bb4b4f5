"""Samples the next token of every row, each with its own parameters and its own random stream.

Inverse transform sampling: one uniform number per token from a counter-based hash of the request's seed and
the token's position, looked up in the cumulative distribution of the row. So the tokens of a request depend
neither on the rest of the batch nor on interruptions.

The fast path samples in the kernels with the same method (`SamplingState`), and here only for requests with
parameters that the kernels do not support; the plain path always samples here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.kernels.interface import SamplingState
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.step import Step

_SCORED_ROWS = 512  # logits whose log-softmax is computed at a time


def sample(
    logits: torch.Tensor, requests: list[Request], positions: np.ndarray | None = None
) -> SampledTokens:
    """Sample one token per row of `logits` [R, V], at the given positions of the requests; by default at the
    next position of each."""
    if positions is None:
        positions = np.array([len(request.token_ids) for request in requests], np.int64)
    tokens, log_probs = sample_rows(logits, requests, positions)
    return SampledTokens(tokens=tokens.tolist(), log_probs=log_probs.tolist())


@dataclass(kw_only=True, eq=False)
class SampledTokens:
    """Sampled tokens and their log-probs under softmax(logits / temperature), one per row."""

    tokens: list[int]
    log_probs: list[float]


def sample_rows(
    logits: torch.Tensor, requests: list[Request], positions: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [R] at these positions of the requests, and their log-probs [R].

    Log-probs are those of softmax(logits / temperature) in fp32, before penalties, biases, constraints
    and the filters top_k, top_p and min_p: what a trainer computes from the same logits.
    """
    logits = logits.float()
    scales = [request.params.scale for request in requests]
    scale: torch.Tensor | None = None
    if any(value != 1.0 for value in scales):
        scale = torch.tensor(scales, device=logits.device).unsqueeze(1)
    log_probs = torch.log_softmax(logits if scale is None else logits / scale, dim=-1)
    with_top = [i for i, request in enumerate(requests) if request.num_top_log_probs]
    if with_top:
        _record_top(log_probs[with_top], [requests[i] for i in with_top])
    distribution, reshaped = log_probs, [(i, r) for i, r in enumerate(requests) if _is_shaped(r)]
    if reshaped:
        logits = _shape(logits, reshaped)
        distribution = torch.log_softmax(logits if scale is None else logits / scale, dim=-1)
    tokens = _choose(distribution, requests, positions)
    return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _is_shaped(request: Request) -> bool:
    params = request.params
    return params.penalized or params.min_new_tokens > 0 or params.constrained


def _choose(
    log_probs: torch.Tensor, requests: list[Request], positions: np.ndarray
) -> torch.Tensor:
    """Return token ids [R]: the argmax of greedy rows, samples for all other rows."""
    greedy = [request.params.greedy for request in requests]
    if all(greedy):
        return log_probs.argmax(dim=-1)
    probs = log_probs.exp()
    filtered = [i for i, request in enumerate(requests) if request.params.filtered]
    if filtered:
        probs[filtered] = _filter(probs[filtered], [requests[i] for i in filtered])
    seeds = np.array([request.seed for request in requests], np.uint64)
    uniform = torch.from_numpy(uniforms(seeds, positions)).to(probs.device)
    total = probs.cumsum(dim=-1, dtype=torch.float64)
    # The first token whose cumulative weight exceeds the target; its own weight is positive.
    target = uniform.unsqueeze(1) * total[:, -1:]
    tokens = torch.searchsorted(total, target, right=True).squeeze(1)
    tokens = tokens.clamp_(max=probs.shape[1] - 1)
    if any(greedy):
        chosen = torch.tensor(greedy, device=probs.device)
        tokens = torch.where(chosen, log_probs.argmax(dim=-1), tokens)
    return tokens


def _record_top(log_probs: torch.Tensor, requests: list[Request]) -> None:
    """Append the most likely tokens and their log-probs to each request."""
    count = min(max(r.num_top_log_probs for r in requests), log_probs.shape[1])
    values, tokens = log_probs.topk(count, dim=-1)
    for request, row, ids in zip(requests, values.tolist(), tokens.tolist(), strict=True):
        pairs = list(zip(ids, row, strict=True))
        request.top_log_probs.append(pairs[: request.num_top_log_probs])


def score(
    logits: torch.Tensor, requests: list[Request], positions: list[int]
) -> list[tuple[Request, float]]:
    """Return the log-prob of the prompt token after position i of request i, from row i of `logits`."""
    targets = [r.token_ids[p + 1] for r, p in zip(requests, positions, strict=True)]
    values: list[float] = []
    for start in range(0, len(targets), _SCORED_ROWS):
        part = logits[start : start + _SCORED_ROWS].float()
        index = torch.tensor(targets[start : start + _SCORED_ROWS], device=part.device).unsqueeze(1)
        values += torch.log_softmax(part, dim=-1).gather(1, index).squeeze(1).tolist()
    return list(zip(requests, values, strict=True))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) from 64-bit seeds and positions (splitmix64's finalizer, twice)."""
    streams = _mix(seeds.astype(np.uint64) + _GOLDEN)
    state = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _filter(probs: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """Zero the tokens outside of top_k, top_p and min_p; the rest is not renormalised."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=probs.device, dtype=torch.float64).unsqueeze(1)

    vocab = probs.shape[1]
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probs.device)
    before = sorted_probs.cumsum(dim=-1, dtype=torch.float64) - sorted_probs
    top_k = column([p.params.top_k if p.params.top_k > 0 else vocab for p in requests])
    top_p = column([p.params.top_p for p in requests])
    min_p = column([p.params.min_p for p in requests])
    drop = (rank >= top_k) | (before > top_p) | (sorted_probs < sorted_probs[:, :1] * min_p)
    return torch.zeros_like(probs).scatter_(1, order, sorted_probs.masked_fill(drop, 0.0))


def _shape(logits: torch.Tensor, requests: list[tuple[int, Request]]) -> torch.Tensor:
    """Apply penalties, biases and constraints, and forbid end tokens before min_new_tokens."""
    logits = logits.clone()
    for row, request in requests:
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
            values = logits[row, seen]
            penalty = params.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            output = torch.tensor(request.output_ids, dtype=torch.int64, device=logits.device)
            counts = torch.bincount(output, minlength=logits.shape[1])
            logits[row] -= (
                counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
            )
        if params.logit_bias:
            tokens, biases = (torch.from_numpy(x).to(logits.device) for x in params.bias_arrays)
            logits[row, tokens] += biases
        if request.num_output < params.min_new_tokens:
            logits[row, sorted(request.eos_ids | params.stop_token_ids)] = float("-inf")
        if request.constraint is not None:
            allowed = request.constraint.allowed(request.output_ids, logits.shape[1])
            mask = torch.from_numpy(allowed).to(logits.device)
            logits[row].masked_fill_(~mask, float("-inf"))
    return logits


def make_sampling_state(num_rows: int, device: torch.device) -> SamplingState:
    return SamplingState(
        temperatures=torch.ones(num_rows, dtype=torch.float32, device=device),
        seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
        last_tokens=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def set_sampling_state(state: SamplingState, step: Step) -> None:
    """Write the parameters of requests that sample their first token to their rows."""
    requests = [span.request for span in step.prefill if span.samples]
    if not requests:
        return
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
    """Resample in torch for requests with special parameters; return whether there were any.

    With `ends_forbidden` the kernel has applied `forbidden_ends`, so min_new_tokens alone is not special.
    """
    special = [
        i
        for i, request in enumerate(requests)
        if request.num_top_log_probs
        or (request.params.reshaped if ends_forbidden else request.params.special)
    ]
    if not special:
        return False
    chosen = [requests[i] for i in special]
    index = torch.tensor(special, device=logits.device)
    following = positions[special].astype(np.int64) + 1
    sampled, values = sample_rows(logits[index], chosen, following)
    tokens[index] = sampled.to(tokens.dtype)
    log_probs[index] = values
    rows = torch.tensor([request.row for request in chosen], device=logits.device)
    state.last_tokens[rows] = sampled.to(state.last_tokens.dtype)
    return True
