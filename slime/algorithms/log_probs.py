"""Log-probs and entropy of given tokens from hidden states, without materializing logits [T, V].

Logits exist for `chunk_size` positions at a time. The forward pass saves the log-sum-exp of each
position; the backward pass recomputes the logits of each chunk. The logits matmul is in the model's
dtype, as in the inference engine; softmax, entropy and gradient accumulation are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from slime.utils.compiled import compiled_on_gpu

_NO_LOGIT = -1e30  # logit of a padded vocabulary entry: finite, so that 0 * it is 0


def log_probs_from_hidden(
    hidden: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [V, H]; under tensor parallelism this rank's [V / tp, H]
    labels: torch.Tensor,  # [T] vocabulary ids
    *,
    bias: torch.Tensor | None = None,  # [V]
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    mask: torch.Tensor | None = None,  # [T]
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log softmax(hidden @ weight.T / temperature)[labels], and the entropy: [T], [T].

    Both are fp32 and differentiable in hidden, weight and bias. Positions where `mask` is 0 are not
    computed and return 0. With `tp_group`, rank i of the group holds the i-th block of vocabulary
    rows and the same hidden states; gradients of hidden are all-reduced over the group. Rows from
    `vocab_size` on are padding of the vocabulary and are excluded from the softmax.
    """
    vocab = _Vocab(weight.shape[0], vocab_size, tp_group, temperature)
    if mask is None:
        index = None
    else:
        index = mask.nonzero().squeeze(1)
        hidden, labels = hidden.index_select(0, index), labels.index_select(0, index)
    weight = weight.to(hidden.dtype)
    log_probs, entropy = _LogProbs.apply(
        hidden, weight, bias, labels, vocab, chunk_size, with_entropy
    )
    if mask is not None:
        log_probs = log_probs.new_zeros(mask.shape).index_copy(0, index, log_probs)
        entropy = entropy.new_zeros(mask.shape).index_copy(0, index, entropy)
    return log_probs, entropy if with_entropy else None


class _Vocab:
    """This rank's block of the vocabulary and the reduction over the blocks of all TP ranks."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int | None,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> None:
        self.num_rows = num_rows
        self.start = 0 if group is None else dist.get_rank(group) * num_rows
        valid = num_rows if vocab_size is None else min(max(vocab_size - self.start, 0), num_rows)
        self.valid = valid
        self.group = group
        self.temperature = temperature

    def is_whole(self, hidden: torch.Tensor) -> bool:
        """Return whether the fused kernel applies: no vocabulary shards, half precision, GPU."""
        half = hidden.dtype in (torch.bfloat16, torch.float16)
        return hidden.is_cuda and half and self.group is None and self.valid == self.num_rows

    def logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return logits [chunk, V] in fp32, divided by the temperature."""
        logits = F.linear(hidden, weight, bias).to(_accumulate_dtype(hidden))
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.valid < self.num_rows:
            logits[:, self.valid :] = _NO_LOGIT
        return logits

    def local_labels(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each label's row in this block [chunk, 1] and whether it is in it [chunk]."""
        local = labels - self.start
        inside = (local >= 0) & (local < self.num_rows)
        return local.clamp(0, self.num_rows - 1).unsqueeze(1), inside

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        vocab: _Vocab,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _accumulate_dtype(hidden)
        log_probs, lse, entropy = hidden.new_zeros((3, len(hidden)), dtype=dtype)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            if vocab.is_whole(hidden):
                raw = F.linear(hidden[rows], weight, bias)
                chunk = _fused_statistics(raw, labels[rows].unsqueeze(1), vocab.temperature)
            else:
                logits = vocab.logits(hidden[rows], weight, bias)
                chunk = _statistics(logits, labels[rows], vocab, with_entropy)
            log_probs[rows], lse[rows], entropy[rows] = chunk
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        ctx.vocab, ctx.chunk_size = vocab, chunk_size
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(lse)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = _accumulate_dtype(hidden)
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=total) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=total) if needs_bias else None
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            upstream = None if grad_entropy is None else grad_entropy[rows]
            if ctx.vocab.is_whole(hidden):
                grad_logits = _fused_grad_logits(
                    F.linear(hidden[rows], weight, bias),
                    labels[rows].unsqueeze(1),
                    lse[rows],
                    entropy[rows],
                    grad_log_probs[rows],
                    upstream if upstream is not None else torch.zeros_like(lse[rows]),
                    ctx.vocab.temperature,
                )
            else:
                grad_logits = _grad_logits(
                    ctx.vocab.logits(hidden[rows], weight, bias),
                    labels[rows],
                    lse[rows],
                    entropy[rows],
                    grad_log_probs[rows],
                    upstream,
                    ctx.vocab,
                )
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None and hidden.dtype == total:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        if grad_hidden is not None:
            ctx.vocab.all_reduce(grad_hidden, dist.ReduceOp.SUM)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


@compiled_on_gpu
def _fused_statistics(
    raw: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `_statistics` from half-precision logits [chunk, V] and labels [chunk, 1]."""
    logits = raw.float() / temperature
    peak = logits.amax(dim=1, keepdim=True)
    shifted = logits - peak
    exp = shifted.exp()
    total = exp.sum(dim=1)
    log_sum = total.log()
    entropy = log_sum - (exp * shifted).sum(dim=1) / total
    target = raw.gather(1, labels).squeeze(1).float() / temperature
    lse = peak.squeeze(1) + log_sum
    return target - lse, lse, entropy


@compiled_on_gpu
def _fused_grad_logits(
    raw: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Compute `_grad_logits` from half-precision logits; the gradient has their dtype."""
    log_p = raw.float() / temperature - lse.unsqueeze(1)
    slope = grad_log_probs.unsqueeze(1) + grad_entropy.unsqueeze(1) * (log_p + entropy.unsqueeze(1))
    is_label = torch.arange(raw.shape[1], device=raw.device).unsqueeze(0) == labels
    grad = torch.where(is_label, grad_log_probs.unsqueeze(1), 0.0) - log_p.exp() * slope
    return (grad / temperature).to(raw.dtype)


def _statistics(
    logits: torch.Tensor, labels: torch.Tensor, vocab: _Vocab, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return label log-probs, log-sum-exp and entropy of one chunk; the logits are overwritten."""
    peak = vocab.all_reduce(logits.amax(dim=1), dist.ReduceOp.MAX)
    logits.sub_(peak.unsqueeze(1))
    label_rows, inside = vocab.local_labels(labels)
    target = logits.gather(1, label_rows).squeeze(1) * inside
    exp = logits.exp()
    weighted = (exp * logits).sum(1) if with_entropy else torch.zeros_like(target)
    sums = torch.stack([exp.sum(1), target, weighted])
    sum_exp, target, weighted = vocab.all_reduce(sums, dist.ReduceOp.SUM)
    log_sum = sum_exp.log()
    entropy = log_sum - weighted / sum_exp if with_entropy else weighted
    return target - log_sum, peak + log_sum, entropy


def _grad_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    vocab: _Vocab,
) -> torch.Tensor:
    """Return the gradient in the logits z of one chunk, which are overwritten.

    With p = softmax(z): d log p_y / dz_i = [i = y] - p_i and dH / dz_i = -p_i (log p_i + H).
    """
    log_p = logits.sub_(lse.unsqueeze(1))
    grad = log_p.exp()
    if grad_entropy is None:
        grad.mul_(-grad_log_probs.unsqueeze(1))
    else:
        log_p.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
        grad.mul_(log_p.add_(grad_log_probs.unsqueeze(1)).neg_())
    label_rows, inside = vocab.local_labels(labels)
    grad.scatter_add_(1, label_rows, (grad_log_probs * inside).unsqueeze(1))
    return grad.div_(vocab.temperature) if vocab.temperature != 1.0 else grad


def _accumulate_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)
