"""The user's functions that run in the trainer, and how packed tensors reach them.

Hooks see each sample's response tokens on their own, as 1-D tensors of length R in row order; a
"flat" tensor is those laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slime.algorithms.correction import Corrected, Correction, importance_correction
from slime.utils import hook_types
from slime.utils.load_function import load_function
from slime.utils.types import TrainBatch

if TYPE_CHECKING:
    from slime.utils.arguments import Args

Reducer = Callable[[torch.Tensor], torch.Tensor]


class TrainHooks:
    """Loaded once, when the trainer starts; a wrong path or signature is a ConfigError."""

    def __init__(self, args: Args) -> None:
        def load(name: str, protocol: type) -> Callable[..., Any] | None:
            path = getattr(args, name)
            flag = "--" + name.replace("_", "-")
            return None if path is None else load_function(path, flag=flag, protocol=protocol)

        self.args = args
        self.postprocess = load("rollout_data_postprocess_path", hook_types.RolloutDataPostprocess)
        self.advantages = load("custom_advantage_function_path", hook_types.AdvantageFunction)
        self.loss = load("custom_loss_function_path", hook_types.LossFunction)
        self._tis = load("custom_tis_function_path", hook_types.TisFunction)
        self._reducer = load("custom_pg_loss_reducer_function_path", hook_types.PgLossReducer)

    @property
    def see_old_log_probs(self) -> bool:
        """Whether a hook gets the batch before the first step and may look at its old log-probs."""
        return self.postprocess is not None or self.advantages is not None

    def correction(self, batch: TrainBatch) -> Correction | None:
        """What `--use-tis` does to the policy gradient of this micro-batch."""
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

    def pg_reducer(self, batch: TrainBatch) -> Reducer | None:
        """The user's sum over samples, brought to this micro-batch's share of the step's loss."""
        if self._reducer is None:
            return None
        per_token = self.args.calculate_per_token_loss
        total_lens = [p + r for p, r in zip(batch.prompt_lens, batch.response_lens, strict=True)]
        masks = _by_sample(batch.loss_mask, batch)
        reduce = self._reducer(total_lens, batch.response_lens, masks, per_token)
        # The user's sum is over samples (or tokens); what it is divided by spans the whole step.
        scale = batch.loss_weights.max() if per_token else 1 / self.args.global_batch_size
        return lambda token_losses: reduce(torch.cat(_by_sample(token_losses, batch))) * scale


def _custom_correction(
    *,
    fn: Callable[..., Any],
    batch: TrainBatch,
    pg_loss: torch.Tensor,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    **_: object,
) -> Corrected:
    flat_loss, masks, metrics = fn(
        pg_loss=torch.cat(_by_sample(pg_loss, batch)),
        train_log_probs=_by_sample(old_log_probs, batch),
        rollout_log_probs=_by_sample(rollout_log_probs, batch),
        loss_masks=_by_sample(loss_mask, batch),
        total_lengths=[p + r for p, r in zip(batch.prompt_lens, batch.response_lens, strict=True)],
        response_lengths=batch.response_lens,
    )
    return Corrected(
        pg_loss=_packed(flat_loss, batch),
        loss_mask=_packed(torch.cat(list(masks)), batch),
        metrics={name: _packed(torch.as_tensor(value), batch) for name, value in metrics.items()},
    )


def _by_sample(column: torch.Tensor, batch: TrainBatch) -> list[torch.Tensor]:
    """The response part of each sample of a packed column [T]."""
    starts = batch.cu_seqlens[:-1].tolist()
    rows = zip(starts, batch.prompt_lens, batch.response_lens, strict=True)
    return [column[start + prompt - 1 :][:response] for start, prompt, response in rows]


def _packed(flat: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """A flat tensor of all response tokens, or one value for all of them, as a packed column [T]."""
    total = sum(batch.response_lens)
    index = torch.cat(
        _by_sample(torch.arange(len(batch.tokens), device=batch.tokens.device), batch)
    )
    column = torch.zeros(len(batch.tokens), dtype=torch.float32, device=batch.tokens.device)
    return column.index_copy(0, index, flat.to(column).expand(total))
