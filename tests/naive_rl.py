"""Reinforcement learning by the book: one sample, one token at a time, from raw rewards to new weights.

Plain Hugging Face and torch. Every formula is written out from its paper and shares nothing with slime;
whatever the trainer packs, spreads, skips or fuses has to come out as this does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from slime.config.arguments import Args
from slime.core.types import Sample, Status

GROUPS = [0, 0, 0, 0, 5, 5, 5, 9, 3, 3]  # uneven, and one sample alone
EXECUTIONS = [0, 0, 1, 2, 3, 4, 4, 5, 6, 7]  # ten samples of eight executions
MAX_RESPONSE_LEN = 16
Columns = list[torch.Tensor]  # per sample [R]


@dataclass
class Learned:
    """After each rollout: losses and gradient norms, means over its steps; in the end the weights."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def make_samples(model: str, rollout_id: int) -> list[Sample]:
    """Ten samples; the engine's log-probs are those of `model`, a little off."""
    rng = np.random.default_rng(rollout_id)
    net = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    samples = []
    for index, (group, execution) in enumerate(zip(GROUPS, EXECUTIONS, strict=True)):
        prompt_len = int(rng.integers(1, 9))
        response_len = MAX_RESPONSE_LEN if index == 4 else int(rng.integers(1, MAX_RESPONSE_LEN))
        sample = Sample(
            group_index=group,
            index=index,
            rollout_id=100 * rollout_id + execution,
            tokens=rng.integers(0, 256, prompt_len + response_len).tolist(),
            response_length=response_len,
            loss_mask=(rng.random(response_len) < 0.8).astype(int).tolist(),
            reward=1.0 if group == 3 else float(rng.normal()),  # one group of equal rewards
            status=Status.TRUNCATED if index == 4 else Status.COMPLETED,
        )
        if index == 2:
            sample.loss_mask = [0] * response_len  # an execution without trained tokens
        with torch.no_grad():
            exact = log_probs_and_entropy(net, sample, 1.0)[0].numpy()
        sample.rollout_log_probs = (exact + rng.normal(0, 0.3, response_len)).tolist()
        sample.teacher_log_probs = (exact + rng.normal(0, 0.5, response_len)).tolist()
        samples.append(sample)
    return samples


def learn(
    args: Args,
    model: str,
    rollouts: list[list[Sample]],
    ref: str | None = None,
    actor: torch.nn.Module | None = None,
) -> Learned:
    """Train what requires gradients of `actor`, by default all of the model's."""
    actor = actor or AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    before = AutoModelForCausalLM.from_pretrained(ref or model, attn_implementation="eager")
    params = {name: p for name, p in actor.named_parameters() if p.requires_grad}
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in params.values() if p.ndim > 1]},
            {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=args.lr,
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
    )
    learned, step = Learned(), 0
    for number, samples in enumerate(rollouts):
        with torch.no_grad():
            old = [log_probs_and_entropy(actor, s, args.rollout_temperature)[0] for s in samples]
            ref_lp = [
                log_probs_and_entropy(before, s, args.rollout_temperature)[0] for s in samples
            ]
        advantages = token_advantages(args, samples, old, ref_lp)
        losses, norms, share = [], [], []
        for members in _steps(args, samples):
            adam.zero_grad()
            loss, counted = _step_loss(args, actor, samples, members, old, ref_lp, advantages)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), args.clip_grad)))
            for group in adam.param_groups:
                group["lr"] = rate(args, step)
            adam.step()
            step += 1
            losses.append(loss.item())
            share.append(counted)
        learned.losses.append(sum(losses) / sum(share))
        learned.grad_norms.append(float(np.mean(norms)))
        if args.ref_update_interval and (number + 1) % args.ref_update_interval == 0:
            before.load_state_dict(actor.state_dict())
    learned.weights = {name: p.detach() for name, p in params.items()}
    return learned


def rate(args: Args, step: int) -> float:
    """Up in equal parts to the full rate, then for --lr-decay-style linear down to the lowest."""
    if step < args.lr_warmup_iters:
        return args.lr * (step + 1) / args.lr_warmup_iters
    if args.lr_decay_style == "constant":
        return args.lr
    gone = (step - args.lr_warmup_iters) / (args.lr_decay_iters - args.lr_warmup_iters)
    return args.lr + (args.min_lr - args.lr) * min(gone, 1.0)


def log_probs_and_entropy(
    net: Any, sample: Sample, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, response = torch.tensor(sample.tokens), sample.response_length
    logits = net(input_ids=tokens[None], use_cache=False).logits[0, -response - 1 : -1]
    log_softmax = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, tokens[-response:, None]).squeeze(1), entropy


def compared_rewards(args: Args, samples: list[Sample]) -> list[float]:
    """Return each reward relative to its group, as the estimator normalizes it."""
    raw = []
    for sample in samples:
        penalty = 0.0
        if args.overlong_buffer_len:
            start = args.rollout_max_response_len - args.overlong_buffer_len
            over = min(max(sample.response_length - start, 0), args.overlong_buffer_len)
            penalty = -over / args.overlong_buffer_len * args.overlong_penalty_factor
        raw.append(sample.reward + penalty)
    kind = args.advantage_estimator
    if args.disable_rewards_normalization or kind in ("reinforce_plus_plus", "ppo"):
        return raw
    result = []
    for i, sample in enumerate(samples):
        group = [raw[j] for j in range(len(raw)) if samples[j].group_index == sample.group_index]
        others = [
            raw[j]
            for j in range(len(raw))
            if j != i and samples[j].group_index == sample.group_index
        ]
        if not others:
            result.append(0.0)
        elif kind == "rloo":
            result.append(raw[i] - sum(others) / len(others))
        elif kind == "reinforce_plus_plus_baseline" or args.disable_grpo_std_normalization:
            result.append(raw[i] - sum(group) / len(group))
        else:
            mean = sum(group) / len(group)
            result.append((raw[i] - mean) / (torch.tensor(group).std().item() + 1e-6))
    return result


def token_advantages(
    args: Args, samples: list[Sample], old: Columns, ref: Columns
) -> list[dict[int, float]]:
    """The advantage of each trained token of each sample, by its place in the response."""
    gamma = args.gamma if args.advantage_estimator == "reinforce_plus_plus" else 1.0
    rewards = compared_rewards(args, samples)
    table: list[dict[int, float]] = []
    for sample, reward, mine, theirs in zip(samples, rewards, old, ref, strict=True):
        trained = [t for t in range(sample.response_length) if sample.loss_mask[t]]
        earned = {
            t: -args.kl_coef * kl(mine[t], theirs[t], args.kl_loss_type).item() for t in trained
        }
        if trained:
            earned[trained[-1]] += reward
        table.append(
            {
                t: sum(gamma**k * earned[u] for k, u in enumerate(trained[place:]))
                for place, t in enumerate(trained)
            }
        )
    if not args.normalize_advantages:
        return table
    every = np.array([a for row in table for a in row.values()])
    scale = math.sqrt(every.var() + 1e-8)
    return [{t: (a - every.mean()) / scale for t, a in row.items()} for row in table]


def kl(ours: torch.Tensor, theirs: torch.Tensor, kind: str) -> torch.Tensor:
    d = ours - theirs
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    k3 = (-d).exp() - 1 + d
    return k3.clamp(max=10) if kind == "low_var_kl" else k3


def _steps(args: Args, samples: list[Sample]) -> Iterator[list[int]]:
    """Sample numbers of each optimizer step: so many executions each, as they come."""
    order: list[int] = []
    for sample in samples:
        if sample.rollout_id not in order:
            order.append(sample.rollout_id)
    for start in range(0, len(order), args.global_batch_size):
        chosen = order[start : start + args.global_batch_size]
        yield [i for i, sample in enumerate(samples) if sample.rollout_id in chosen]


def _step_loss(
    args: Args,
    actor: Any,
    samples: list[Sample],
    members: list[int],
    old: Columns,
    ref: Columns,
    advantages: list[dict[int, float]],
) -> tuple[torch.Tensor, float]:
    """The loss, and the share of its divisor that belongs to trained tokens."""
    by_execution: dict[int, list[torch.Tensor]] = {}
    for i in members:
        losses = _token_losses(args, actor, samples[i], old[i], ref[i], advantages[i])
        by_execution.setdefault(samples[i].rollout_id, []).extend(losses)
    if args.calculate_per_token_loss:
        return torch.stack([x for losses in by_execution.values() for x in losses]).mean(), 1.0
    means = [torch.stack(losses).mean() for losses in by_execution.values() if losses]
    return torch.stack(means).sum() / len(by_execution), len(means) / len(by_execution)


def _token_losses(
    args: Args,
    actor: Any,
    sample: Sample,
    old: torch.Tensor,
    ref: torch.Tensor,
    advantages: dict[int, float],
) -> list[torch.Tensor]:
    new, entropy = log_probs_and_entropy(actor, sample, args.rollout_temperature)
    trained = list(advantages)
    engine = sample.rollout_log_probs
    base = {t: engine[t] if args.use_rollout_logprobs else old[t].item() for t in trained}
    weights = _importance(args, {t: old[t].item() - engine[t] for t in trained})
    ratios = {t: (new[t] - base[t]).exp() for t in trained}
    if args.advantage_estimator == "gspo" and trained:
        # The sequence's ratio; each token's own gradient, as in the paper's token variant.
        whole = math.exp(sum(new[t].item() - base[t] for t in trained) / len(trained))
        ratios = {t: whole * (new[t] - new[t].detach()).exp() for t in trained}
    losses = []
    for t in trained:
        a = advantages[t]
        if args.use_opd:
            a -= args.opd_kl_coef * (base[t] - sample.teacher_log_probs[t])
        pg = _bounded(args, ratios[t], a, new[t]) * weights[t]
        if args.use_kl_loss:
            term = kl(new[t], ref[t], args.kl_loss_type)
            if args.use_unbiased_kl:
                term = term * (new[t] - base[t]).exp()
            pg = pg + args.kl_loss_coef * term
        losses.append(pg - args.entropy_coef * entropy[t])
    return losses


def _bounded(args: Args, ratio: torch.Tensor, a: float, log_prob: torch.Tensor) -> torch.Tensor:
    inside = min(max(ratio.item(), 1 - args.eps_clip), 1 + args.eps_clip_high)
    if args.advantage_estimator == "cispo":
        return -inside * a * log_prob
    held = ratio if inside == ratio.item() else torch.tensor(inside)
    surrogate = ratio * a if (ratio * a).item() <= (held * a).item() else held * a
    if args.eps_clip_c is not None and a < 0 and surrogate.item() < args.eps_clip_c * a:
        return torch.tensor(-args.eps_clip_c * a)
    return -surrogate


def _importance(args: Args, gaps: dict[int, float]) -> dict[int, float]:
    """p_trainer / p_engine per token, over the sequence, or its geometric mean; bounded or dropped."""
    if not args.use_tis:
        return dict.fromkeys(gaps, 1.0)
    logs = dict(gaps)
    if args.tis_level != "token" and gaps:
        total = sum(gaps.values())
        logs = dict.fromkeys(gaps, total / len(gaps) if args.tis_level == "geometric" else total)
    weights = {t: math.exp(x) for t, x in logs.items()}
    if args.tis_mode == "mask":
        return {
            t: w if args.tis_clip_low <= w <= args.tis_clip else 0.0 for t, w in weights.items()
        }
    return {t: min(max(w, args.tis_clip_low), args.tis_clip) for t, w in weights.items()}
