"""Hooks of the trainer, written as for earlier versions: batches are read like dictionaries."""

import torch

from tests.compat.rollout_hooks import note


def advantages(args, rollout_data):
    """A reward per sample, on every token of its response."""
    lengths = rollout_data["response_lengths"]
    rewards = rollout_data["rewards"]
    rollout_data["advantages"] = [
        torch.full((n,), r) for n, r in zip(lengths, rewards, strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]
    note(
        args, "advantages", lengths=lengths, knob=args.my_knob, has_values="values" in rollout_data
    )


def postprocess(args, rollout_id, rollout_data):
    log_probs = torch.cat(rollout_data["log_probs"])
    engine = torch.cat(rollout_data["rollout_log_probs"])
    masks = torch.cat(rollout_data["loss_masks"])
    for advantage in rollout_data["advantages"]:
        advantage *= 0.5
    gap = ((log_probs - engine).abs() * masks).max()
    half = [rows[0].item() for rows in rollout_data["advantages"]]
    note(args, "postprocess", gap=gap.item(), rewards=rollout_data["rewards"], advantages=half)


def tis(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths,
    **kwargs,
):  # fmt: skip
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    note(args, "tis", rows=len(total_lengths), responses=sum(response_lengths))
    return pg_loss * ratio.clamp(max=2.0), loss_masks, {"my_ratio": ratio}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda losses: (losses * torch.cat(loss_masks)).sum() / 100


def loss(args, batch, logits, sum_of_sample_mean):
    """The mean negative log-likelihood of each response, over its own tokens."""
    losses, start = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        rows = logits[start + len(tokens) - length - 1 : start + len(tokens) - 1].float()
        log_probs = torch.log_softmax(rows, dim=-1)
        losses.append(-log_probs.gather(1, tokens[-length:, None])[:, 0])
        start += len(tokens)
    flat = torch.cat(losses)
    value = sum_of_sample_mean(flat)
    note(
        args, "loss", rows=len(losses), total=sum(batch["total_lengths"]), per_token=flat.tolist(),
        old=[(-t).tolist() for t in batch["rollout_log_probs"]], my_flag=getattr(args, "my_flag", None),
    )  # fmt: skip
    return value, {"loss": value.clone().detach(), "nll": value.clone().detach()}
