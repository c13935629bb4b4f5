"""PPO by the FSDP trainer, actor and critic, and by a naive loop over single samples and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.config.arguments import Args
from slime.core.types import RolloutBatch
from slime.rollout.train_data import split_batch
from tests.fsdp import DECAY, EPS, ROLLOUT_IDS, Case, make_rows, naive_log_probs, whole_weights

ROLLOUTS = 3
Tensors = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class PpoOutcome:
    """`critic_grads` are those of the first step of the last rollout, when its head is not zero."""

    critic_grads: Tensors
    actor: Tensors
    critic: Tensors
    metrics: list[dict[str, float]]


def start_pair(
    args: Args, rank: int, world_size: int, checkpoints: tuple[str, str] | None = None
) -> tuple[FSDPTrainRayActor, FSDPTrainRayActor]:
    pair = []
    for number, role in enumerate(("actor", "critic")):
        actor = FSDPTrainRayActor(args, rank, world_size)
        checkpoint = checkpoints[number] if checkpoints else None
        with_ref = role == "actor" and args.kl_coef != 0
        actor.init(args, role, with_ref=with_ref, checkpoint=checkpoint)
        pair.append(actor)
    return pair[0], pair[1]


def train_pair(
    pair: tuple[FSDPTrainRayActor, FSDPTrainRayActor], rollout_ids: range
) -> list[dict[str, float]]:
    actor, critic = pair
    metrics = []
    for rollout_id in rollout_ids:
        mine = _rows_of(actor, rollout_id)
        report = actor.train(rollout_id, mine, critic.values(mine))
        other = critic.train(rollout_id, _rows_of(actor, rollout_id), actor.critic_targets())
        both = {**report.metrics, **other.metrics}
        metrics.append({k: v for k, v in both.items() if k.startswith("train/")})
    return metrics


def ppo_on_ranks(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, PpoOutcome]:
    return {name: _ppo(case, rank, world_size) for name, case in cases.items()}


def _ppo(case: Case, rank: int, world_size: int) -> PpoOutcome:
    actor, critic = pair = start_pair(case.args(), rank, world_size)
    metrics = train_pair(pair, range(ROLLOUTS - 1))
    mine = _rows_of(actor, ROLLOUTS - 1)
    mine.values = critic.values(mine).values
    actor.prepare(ROLLOUTS - 1, mine)
    actor.critic_targets()
    critic.forward_backward(next(critic.steps(mine)))
    params = critic.optimizer.params
    grads = {name: p.grad.full_tensor().clone() for name, p in params.items()}
    for param in params.values():
        param.grad = None
    metrics += train_pair(pair, range(ROLLOUTS - 1, ROLLOUTS))
    return PpoOutcome(
        critic_grads=grads,
        actor=whole_weights(actor),
        critic=whole_weights(critic),
        metrics=metrics,
    )


def _rows_of(actor: FSDPTrainRayActor, rollout_id: int) -> RolloutBatch:
    info = actor.parallel
    rows = make_rows(rollout_id)
    return split_batch(actor.args, rows, dp_size=info.dp_size, cp_size=1)[info.dp_rank]


# ---- the naive loop


class NaiveCritic(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        self.hf.lm_head = nn.Linear(self.hf.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.hf.lm_head.weight)

    def values(self, rows: RolloutBatch, row: int) -> torch.Tensor:
        """Before each response token: from the hidden state of the token in front of it. [R]"""
        tokens = torch.tensor(rows.tokens[row].astype(np.int64))
        hidden = self.hf.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        response = int(rows.response_lens[row])
        return self.hf.lm_head(hidden[-response - 1 : -1]).squeeze(1)


def ppo_naively(case: Case) -> PpoOutcome:
    args = case.args()
    actor = AutoModelForCausalLM.from_pretrained(case.model, attn_implementation="eager")
    ref = AutoModelForCausalLM.from_pretrained(case.model, attn_implementation="eager")
    critic = NaiveCritic(case.model)
    actor_adam, critic_adam = _adam(actor, args.lr), _adam(critic, args.critic_lr or args.lr)
    metrics: list[dict[str, float]] = []
    grads: Tensors = {}
    for rollout_id in range(ROLLOUTS):
        rows = make_rows(rollout_id)
        numbers = range(len(rows))
        with torch.no_grad():
            old = [naive_log_probs(actor, rows, i, args)[0] for i in numbers]
            before = [naive_log_probs(ref, rows, i, args)[0] for i in numbers]
            values = [critic.values(rows, i) for i in numbers]
        advantages, returns = naive_gae(args, rows, old, before, values)
        losses: dict[str, list[float]] = {"actor": [], "critic": []}
        for step in range(case.steps):
            if rollout_id >= args.num_critic_only_steps:
                loss = _sum(case, step, rows, partial(_policy, args, actor, rows, old, advantages))
                losses["actor"].append(_learn(loss, actor, actor_adam, args))
        for step in range(case.steps):
            loss = _sum(case, step, rows, partial(_value, args, critic, rows, values, returns))
            losses["critic"].append(_learn(loss, critic, critic_adam, args))
            if rollout_id == ROLLOUTS - 1 and step == 0:
                grads = {k.removeprefix("hf."): g for k, g in critic.unclipped.items()}
        counted = {e for e, m in zip(ROLLOUT_IDS, rows.loss_masks, strict=True) if m.any()}
        share = len(counted) / 8  # an execution without trained tokens has no part in a mean
        metrics.append({name: np.mean(v) / share for name, v in losses.items() if v})
    return PpoOutcome(
        critic_grads=grads,
        actor={n: p.detach() for n, p in actor.named_parameters()},
        critic={n.removeprefix("hf."): p.detach() for n, p in critic.named_parameters()},
        metrics=metrics,
    )


def naive_gae(
    args: Args,
    rows: RolloutBatch,
    old: list[torch.Tensor],
    ref: list[torch.Tensor],
    values: list[torch.Tensor],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A_t and R_t of each trained token from the definition, a double sum; 0 elsewhere."""
    advantages, returns = [], []
    for i in range(len(rows)):
        trained = np.flatnonzero(rows.loss_masks[i])
        advantage, target = np.zeros((2, int(rows.response_lens[i])))
        v = [float(values[i][t]) for t in trained] + [0.0]
        earned = [-args.kl_coef * float(old[i][t] - ref[i][t]) for t in trained]
        if len(trained):
            earned[-1] += float(rows.rewards[i])
        deltas = [earned[k] + args.gamma * v[k + 1] - v[k] for k in range(len(trained))]
        for k, t in enumerate(trained):
            advantage[t] = sum((args.gamma * args.lambd) ** j * d for j, d in enumerate(deltas[k:]))
            target[t] = advantage[t] + v[k]
        advantages.append(advantage)
        returns.append(target)
    if args.normalize_advantages:
        every = np.concatenate([a[m > 0] for a, m in zip(advantages, rows.loss_masks, strict=True)])
        scale = np.sqrt(every.var() + 1e-8)
        advantages = [
            np.where(m > 0, (a - every.mean()) / scale, 0.0)
            for a, m in zip(advantages, rows.loss_masks, strict=True)
        ]
    return advantages, returns


def _policy(args: Args, model: Any, rows: RolloutBatch, old: list, adv: list, i: int) -> Any:
    log_probs, _ = naive_log_probs(model, rows, i, args)
    ratio, a = (log_probs - old[i]).exp(), torch.tensor(adv[i], dtype=torch.float32)
    return -torch.minimum(ratio * a, ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip) * a)


def _value(args: Args, critic: Any, rows: RolloutBatch, old: list, returns: list, i: int) -> Any:
    v, target = critic.values(rows, i), torch.tensor(returns[i], dtype=torch.float32)
    near = torch.minimum(torch.maximum(v, old[i] - args.value_clip), old[i] + args.value_clip)
    return torch.maximum((v - target) ** 2, (near - target) ** 2) / 2


def _sum(case: Case, step: int, rows: RolloutBatch, token_losses: Any) -> torch.Tensor:
    """The mean over the step's executions of the mean over their trained tokens."""
    per_step = 8 // case.steps
    executions = range(step * per_step, (step + 1) * per_step)
    losses: dict[int, list[torch.Tensor]] = {e: [] for e in executions}
    for i, execution in enumerate(ROLLOUT_IDS):
        if execution in executions:
            losses[execution] += list(token_losses(i)[rows.loss_masks[i] > 0])
    return sum(torch.stack(x).mean() for x in losses.values() if x) / per_step


def _learn(loss: torch.Tensor, model: Any, adam: torch.optim.Optimizer, args: Args) -> float:
    adam.zero_grad()
    loss.backward()
    params = [p for p in model.parameters() if p.grad is not None]
    model.unclipped = {n: p.grad.clone() for n, p in model.named_parameters()}
    torch.nn.utils.clip_grad_norm_(params, args.clip_grad)
    adam.step()
    return loss.item()


def _adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, eps=EPS)
