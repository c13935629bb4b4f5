"""Select and call the loss of one micro-batch, by the model's role and `--loss-type`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime.algorithms.policy_loss import policy_loss, sft_loss, value_loss
from slime.backends.hooks import TrainHooks
from slime.core.types import LossInputs, LossOutput, MetricSum, TrainBatch

if TYPE_CHECKING:
    from slime.config.arguments import Args


class TrainLoss:
    def __init__(self, args: Args, role: str, hooks: TrainHooks) -> None:
        self.args, self.role, self.hooks = args, role, hooks

    def __call__(
        self,
        batch: TrainBatch,
        outputs: torch.Tensor,  # [T]: log-probs of the labels, or a critic's values
        entropy: torch.Tensor | None,  # [T]
        cp_group: dist.ProcessGroup | None,
    ) -> LossOutput:
        if self.role == "critic":
            return self._recomputed(partial(self._value, batch), outputs)
        if entropy is not None and not self.args.entropy_coef:
            entropy = entropy.detach()  # only a metric: skip its gradient in the backward pass
        inputs = _inputs(batch, outputs, entropy)
        if self.args.loss_type == "sft_loss":
            return self._recomputed(sft_loss, inputs)
        return self._recomputed(partial(self._policy, batch, cp_group), inputs)

    def custom(self, batch: TrainBatch, logits: torch.Tensor) -> LossOutput:
        """Return the loss of `--custom-loss-function-path`, which takes logits [T, V]."""
        assert self.hooks.loss is not None
        weights = batch.loss_weights
        call = partial(self.hooks.loss, self.args, batch)
        loss, log = self._recomputed(call, logits, lambda x: (x * weights).sum())
        count = float(weights.sum())
        values = {"loss": loss.detach(), **log}
        metrics = {k: MetricSum(total=float(v), count=count) for k, v in values.items()}
        return LossOutput(loss=loss, metrics=metrics)

    def _recomputed(self, loss: Callable[..., Any], *inputs: Any) -> Any:
        """Call `loss`; with --recompute-loss-function under activation checkpointing."""
        if not self.args.recompute_loss_function:
            return loss(*inputs)
        return checkpoint(loss, *inputs, use_reentrant=False)

    def _policy(
        self, batch: TrainBatch, cp_group: dist.ProcessGroup | None, inputs: LossInputs
    ) -> LossOutput:
        args = self.args
        return policy_loss(
            inputs,
            estimator=args.advantage_estimator,
            eps_clip=args.eps_clip,
            eps_clip_high=args.eps_clip_high,
            eps_clip_c=args.eps_clip_c,
            kl_loss_coef=args.kl_loss_coef if args.use_kl_loss else 0.0,
            kl_loss_type=args.kl_loss_type,
            use_unbiased_kl=args.use_unbiased_kl,
            entropy_coef=args.entropy_coef,
            use_rollout_logprobs=args.use_rollout_logprobs,
            correction=self.hooks.correction(batch),
            opd_kl_coef=args.opd_kl_coef if args.use_opd else 0.0,
            reduce_pg=self.hooks.pg_reducer(batch, cp_group),
            cp_group=cp_group,
        )

    def _value(self, batch: TrainBatch, values: torch.Tensor) -> LossOutput:
        assert batch.values is not None and batch.returns is not None
        return value_loss(
            values,
            old_values=batch.values,
            returns=batch.returns,
            loss_weights=batch.loss_weights,
            value_clip=self.args.value_clip,
        )


def _inputs(batch: TrainBatch, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> LossInputs:
    return LossInputs(
        log_probs=log_probs,
        loss_mask=batch.loss_mask,
        loss_weights=batch.loss_weights,
        cu_seqlens=batch.cu_seqlens,
        entropy=entropy,
        advantages=batch.advantages,
        returns=batch.returns,
        values=batch.values,
        old_log_probs=batch.old_log_probs,
        ref_log_probs=batch.ref_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        teacher_log_probs=batch.teacher_log_probs,
    )
