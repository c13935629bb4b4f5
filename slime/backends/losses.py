"""The loss of one micro-batch, by the model's role and `--loss-type`, and the trainer's user hooks.

Hooks get one 1-D tensor of length R per sample (its response tokens), in row order; a "flat" tensor
is their concatenation. `WholeRows` converts packed columns to these tensors and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime.algorithms.policy_loss import (
    Corrected,
    Correction,
    Reducer,
    importance_correction,
    policy_loss,
    sft_loss,
    value_loss,
)
from slime.config import hook_types
from slime.config.flags.spec import option_of
from slime.core.packing import join_slices, zigzag_index
from slime.core.types import LossInputs, LossOutput, MetricSum, TrainBatch
from slime.utils.load_function import load_hook

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
    """Return the inputs of a loss: the outputs of the forward pass, and the batch's columns by name."""
    columns = {f.name for f in fields(LossInputs)} - {"log_probs", "entropy"}
    shared = {name: getattr(batch, name) for name in columns}
    return LossInputs(log_probs=log_probs, entropy=entropy, **shared)


class TrainHooks:
    """The trainer's hooks, loaded once at start; a wrong path or signature raises ConfigError."""

    def __init__(self, args: Args) -> None:
        def load(name: str, protocol: type) -> Callable[..., Any] | None:
            path = getattr(args, name)
            flag = option_of(name)
            return None if path is None else load_hook(path, flag=flag, protocol=protocol)

        def load_with_view(name: str, protocol: type) -> Callable[..., Any] | None:
            fn = load(name, protocol)
            if fn is None:
                return None
            from slime.compat import batches  # for hooks that read a batch like a dictionary

            of_loss = protocol is hook_types.LossFunction
            return batches.with_train_view(fn) if of_loss else batches.with_rollout_view(fn)

        self.args = args
        self.postprocess = load_with_view(
            "rollout_data_postprocess_path", hook_types.RolloutDataPostprocess
        )
        self.advantages = load_with_view(
            "custom_advantage_function_path", hook_types.AdvantageFunction
        )
        self.loss = load_with_view("custom_loss_function_path", hook_types.LossFunction)
        self._tis = load("custom_tis_function_path", hook_types.TisFunction)
        self._reducer = load("custom_pg_loss_reducer_function_path", hook_types.PgLossReducer)

    @property
    def see_old_log_probs(self) -> bool:
        """Whether a hook gets the batch before the first step and may read its old log-probs."""
        return self.postprocess is not None or self.advantages is not None

    def correction(self, batch: TrainBatch) -> Correction | None:
        """Return the importance correction of `--use-tis` for this micro-batch, or None."""
        args = self.args
        if not args.use_tis:
            return None
        if self._tis is not None:
            return partial(_custom_correction, fn=partial(self._tis, args=args), batch=batch)
        return partial(
            importance_correction,
            level=args.tis_level,
            mode=args.tis_mode,
            low=args.tis_clip_low,
            high=args.tis_clip,
        )

    def pg_reducer(
        self, batch: TrainBatch, cp_group: dist.ProcessGroup | None = None
    ) -> Reducer | None:
        """Return the user's loss reducer, scaled to this micro-batch's share of the step's loss."""
        if self._reducer is None:
            return None
        per_token = self.args.calculate_per_token_loss
        rows = WholeRows(batch, cp_group)
        masks = rows.cut(batch.loss_mask)
        reduce = self._reducer(batch.total_lens, batch.response_lens, masks, per_token)
        # The user's function sums over samples (or tokens); the divisor covers the whole step.
        scale = rows.largest(batch.loss_weights) if per_token else 1 / batch.num_trajectories
        return lambda losses: rows.share(reduce(torch.cat(rows.cut(losses))) * scale)


def _custom_correction(
    *,
    fn: Callable[..., Any],
    batch: TrainBatch,
    pg_loss: torch.Tensor,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    cp_group: dist.ProcessGroup | None,
    **_: object,
) -> Corrected:
    rows = WholeRows(batch, cp_group)
    flat_loss, masks, metrics = fn(
        pg_loss=torch.cat(rows.cut(pg_loss)),
        train_log_probs=rows.cut(old_log_probs),
        rollout_log_probs=rows.cut(rollout_log_probs),
        loss_masks=rows.cut(loss_mask),
        total_lengths=batch.total_lens,
        response_lengths=batch.response_lens,
    )
    device = pg_loss.device
    return Corrected(
        pg_loss=rows.packed(flat_loss),
        loss_mask=rows.packed(torch.cat(list(masks))),
        metrics={k: rows.packed(torch.as_tensor(v, device=device)) for k, v in metrics.items()},
    )


class WholeRows:
    def __init__(self, batch: TrainBatch, cp_group: dist.ProcessGroup | None) -> None:
        self.batch, self.group = batch, cp_group
        self.cp_size = 1 if cp_group is None else dist.get_world_size(cp_group)
        starts = (batch.cu_seqlens[:-1] * self.cp_size).tolist()
        rows = zip(starts, batch.prompt_lens, batch.response_lens, strict=True)
        self._spans = [(start + prompt - 1, response) for start, prompt, response in rows]

    def cut(self, column: torch.Tensor) -> list[torch.Tensor]:
        """Return the response tokens of each sample of a packed column [T], as tensors [R]."""
        whole = self._whole(column)
        return [whole[start : start + length] for start, length in self._spans]

    def packed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's column [T] from all response tokens end to end, or one value."""
        index = torch.cat([torch.arange(s, s + n) for s, n in self._spans]).to(flat.device)
        total = len(self.batch.tokens) * self.cp_size
        column = torch.zeros(total, dtype=torch.float32, device=flat.device)
        column = column.index_copy(0, index, flat.to(column).expand(len(index)))
        if self.group is None:
            return column
        padded = (self.batch.cu_seqlens.diff() * self.cp_size).cpu().numpy()
        mine = zigzag_index(padded, dist.get_rank(self.group), self.cp_size)
        return column[torch.from_numpy(mine).to(column.device)]

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """Return value / cp_size with the full gradient: the sum over CP ranks is then `value`."""
        return value - value.detach() * (1 - 1 / self.cp_size)

    def largest(self, column: torch.Tensor) -> torch.Tensor:
        value = column.max()
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def _whole(self, column: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return column
        slices = [torch.empty_like(column) for _ in range(self.cp_size)]
        dist.all_gather(slices, column.detach().contiguous(), group=self.group)
        slices[dist.get_rank(self.group)] = column
        return join_slices(slices, self.batch)
