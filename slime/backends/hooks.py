"""User hooks that run in the trainer, and the conversion of packed tensors for them.

Hooks get one 1-D tensor of length R per sample (its response tokens), in row order; a "flat" tensor
is their concatenation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.algorithms.correction import Corrected, Correction, importance_correction
from slime.backends.whole_rows import WholeRows
from slime.config import hook_types
from slime.config.flags.spec import option_of
from slime.core.types import TrainBatch
from slime.utils.load_function import load_function

if TYPE_CHECKING:
    from slime.config.arguments import Args

Reducer = Callable[[torch.Tensor], torch.Tensor]


class TrainHooks:
    """The trainer's hooks, loaded once at start; a wrong path or signature raises ConfigError."""

    def __init__(self, args: Args) -> None:
        def load(name: str, protocol: type) -> Callable[..., Any] | None:
            path = getattr(args, name)
            flag = option_of(name)
            return None if path is None else load_function(path, flag=flag, protocol=protocol)

        self.args = args
        self.postprocess = load("rollout_data_postprocess_path", hook_types.RolloutDataPostprocess)
        self.advantages = load("custom_advantage_function_path", hook_types.AdvantageFunction)
        self.loss = load("custom_loss_function_path", hook_types.LossFunction)
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
        reduce = self._reducer(_total_lens(batch), batch.response_lens, masks, per_token)
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
        total_lengths=_total_lens(batch),
        response_lengths=batch.response_lens,
    )
    device = pg_loss.device
    return Corrected(
        pg_loss=rows.packed(flat_loss),
        loss_mask=rows.packed(torch.cat(list(masks))),
        metrics={k: rows.packed(torch.as_tensor(v, device=device)) for k, v in metrics.items()},
    )


def _total_lens(batch: TrainBatch) -> list[int]:
    return [p + r for p, r in zip(batch.prompt_lens, batch.response_lens, strict=True)]
