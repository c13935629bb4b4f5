"""One training setting, run by the FSDP trainer on any number of ranks and by a naive loop.

The naive loop is plain Hugging Face and torch: one sample at a time, unpacked, the whole logits, the
loss written out from its definition. It is what every number of ranks and packing must agree with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.config.arguments import Args
from slime.core.types import RolloutBatch
from slime.rollout.train_data import split_batch
from tests.args import make_args

ROLLOUT_IDS = [0, 0, 1, 2, 3, 3, 4, 5, 6, 7]  # ten rows of eight executions
LR, EPS, DECAY = 1e-3, 1e-4, 0.1


@dataclass(kw_only=True)
class Case:
    """A model and what is changed on the command line."""

    model: str
    ref: str | None = None
    steps: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    make_rows: Callable[[int], RolloutBatch] | None = None  # rows with images

    def rows(self, seed: int = 0) -> RolloutBatch:
        return (self.make_rows or make_rows)(seed)

    def args(self, **more: Any) -> Args:
        common = {
            "hf_checkpoint": self.model,
            "ref_load": self.ref,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 4,
            "global_batch_size": 8 // self.steps,
            "lr": LR,
            "lr_decay_style": "constant",
            "adam_eps": EPS,  # so large that rounding of tiny gradients does not show in the update
            "weight_decay": DECAY,
        }
        return make_args(**{**common, **self.flags, **more})


@dataclass(kw_only=True)
class Outcome:
    grads: dict[str, torch.Tensor]  # of the first step of the first rollout
    weights: dict[str, torch.Tensor]  # after all rollouts
    metrics: list[dict[str, float]]


def make_rows(seed: int = 0) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    count = len(ROLLOUT_IDS)
    prompts, responses = rng.integers(1, 12, count), rng.integers(1, 24, count)
    masks = [(rng.random(n) < 0.8).astype(np.int8) for n in responses]
    masks[3][:] = 0  # a sample that counts for nothing
    return RolloutBatch(
        tokens=[rng.integers(0, 256, p + r) for p, r in zip(prompts, responses, strict=True)],
        response_lens=responses,
        loss_masks=masks,
        rewards=rng.normal(size=count),
        raw_rewards=np.zeros(count),
        truncated=np.zeros(count),
        group_indices=np.arange(count) // 5,
        sample_indices=np.arange(count),
        trajectory_ids=ROLLOUT_IDS,
        rollout_log_probs=[-6 * rng.random(n) for n in responses],
    )


def start_actor(args: Args, rank: int, world_size: int, **options: Any) -> FSDPTrainRayActor:
    actor = FSDPTrainRayActor(args, rank, world_size)
    actor.init(args, "actor", with_ref=args.use_kl_loss, **options)
    return actor


def train_on_ranks(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: train_fsdp(case, rank, world_size) for name, case in cases.items()}


def train_fsdp(case: Case, rank: int, world_size: int) -> Outcome:
    args = case.args()
    actor = start_actor(args, rank, world_size)
    mine = split_batch(args, case.rows(), dp_size=world_size, cp_size=1)[rank]
    grads = first_gradient(actor, mine)
    metrics = []
    for rollout_id in range(2):
        mine = split_batch(args, case.rows(rollout_id), dp_size=world_size, cp_size=1)[rank]
        metrics.append(actor.train(rollout_id, mine).metrics)
    return Outcome(grads=grads, weights=whole_weights(actor), metrics=metrics)


def whole_weights(actor: FSDPTrainRayActor) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor().clone() for n, p in actor.model.params.items()}


def first_gradient(actor: FSDPTrainRayActor, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    if actor.needs_ref:
        batch.ref_log_probs = actor.log_probs(batch, "ref")
    if actor.needs_old(batch):
        batch.old_log_probs = actor.log_probs(batch, "actor")
    actor.advantages(0, batch)
    actor.forward_backward(next(actor.steps(batch)))
    params = actor.optimizer.params
    grads = {name: p.grad.full_tensor().clone() for name, p in params.items() if p.grad is not None}
    for param in params.values():
        param.grad = None
    return grads


def naive_model(case: Case) -> PreTrainedModel:
    family = AutoModelForImageTextToText if case.make_rows else AutoModelForCausalLM
    model = family.from_pretrained(case.ref or case.model, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model


def train_naively(case: Case, model: torch.nn.Module | None = None) -> Outcome:
    """Train what requires gradients of `model`, by default all of the case's."""
    args = case.args()
    model = model or naive_model(case)
    ref = naive_model(case)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in params.values() if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        eps=EPS,
    )
    grads: dict[str, torch.Tensor] = {}
    for rollout_id in range(2):
        rows = case.rows(rollout_id)
        with torch.no_grad():
            old = [naive_log_probs(model, rows, i, args)[0] for i in range(len(rows))]
            ref_log_probs = [naive_log_probs(ref, rows, i, args)[0] for i in range(len(rows))]
        per_step = 8 // case.steps
        for step in range(case.steps):
            executions = range(step * per_step, (step + 1) * per_step)
            members = [i for i, e in enumerate(ROLLOUT_IDS) if e in executions]
            adam.zero_grad()
            _naive_loss(args, model, rows, members, old, ref_log_probs).backward()
            grads = grads or {n: p.grad.clone() for n, p in params.items()}
            torch.nn.utils.clip_grad_norm_(list(params.values()), args.clip_grad)
            adam.step()
    return Outcome(grads=grads, weights={n: p.detach() for n, p in params.items()}, metrics=[])


def _naive_loss(
    args: Args,
    model: torch.nn.Module,
    rows: RolloutBatch,
    members: list[int],
    old: list[torch.Tensor],
    ref: list[torch.Tensor],
) -> torch.Tensor:
    """Mean over executions of the mean over their trained tokens, or the mean over all tokens."""
    token_losses: dict[int, list[torch.Tensor]] = {ROLLOUT_IDS[i]: [] for i in members}
    for i in members:
        log_probs, entropy = naive_log_probs(model, rows, i, args)
        advantage = torch.tensor(rows.rewards[i])
        ratio = (log_probs - old[i]).exp()
        bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
        losses = -torch.minimum(ratio * advantage, bounded * advantage)
        if args.loss_type == "sft_loss":
            losses = -log_probs
        if args.use_kl_loss:
            difference = ref[i] - log_probs
            losses = losses + args.kl_loss_coef * (difference.exp() - difference - 1)
        losses = losses - args.entropy_coef * entropy
        token_losses[ROLLOUT_IDS[i]] += [losses[j] for j in np.flatnonzero(rows.loss_masks[i])]
    if args.calculate_per_token_loss:
        return torch.stack([loss for losses in token_losses.values() for loss in losses]).mean()
    means = [torch.stack(losses).mean() for losses in token_losses.values() if losses]
    return torch.stack(means).sum() / len(token_losses)


def naive_log_probs(
    model: torch.nn.Module, rows: RolloutBatch, row: int, args: Args
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.tensor(rows.tokens[row].astype(np.int64))
    response = int(rows.response_lens[row])
    images = image_inputs(model, rows, row, tokens)
    logits = model(input_ids=tokens[None], use_cache=False, **images).logits[0, -response - 1 : -1]
    log_softmax = torch.log_softmax(logits / args.rollout_temperature, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, tokens[-response:, None]).squeeze(1), entropy


def image_inputs(
    model: torch.nn.Module, rows: RolloutBatch, row: int, tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the images of a row as Hugging Face's processor does; the model makes its own positions."""
    if rows.images is None or not len(rows.images[row]):
        return {}
    pixels = [rows.pixels[number] for number in rows.images[row][:, 0]]
    return {
        "pixel_values": torch.from_numpy(np.concatenate([image.values for image in pixels])),
        "image_grid_thw": torch.tensor([image.grid for image in pixels]),
        "mm_token_type_ids": (tokens == model.config.image_token_id).int()[None],
    }
