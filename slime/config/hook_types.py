"""Signatures of the trainer's hooks, one Protocol for each.

Those of the rollout side are in `slime/rollout/base_types.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from slime.config.arguments import Args
    from slime.core.types import RolloutBatch


class RolloutDataPostprocess(Protocol):
    def __call__(self, args: Args, rollout_id: int, rollout_data: RolloutBatch) -> None: ...


class AdvantageFunction(Protocol):
    def __call__(self, args: Args, rollout_data: RolloutBatch) -> None: ...


class LossFunction(Protocol):
    def __call__(
        self,
        args: Args,
        batch: Any,
        logits: torch.Tensor,
        sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, Any]]: ...


class TisFunction(Protocol):
    def __call__(
        self,
        *,
        args: Args,
        pg_loss: torch.Tensor,
        train_log_probs: list[torch.Tensor],
        rollout_log_probs: list[torch.Tensor],
        loss_masks: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]: ...


class PgLossReducer(Protocol):
    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[torch.Tensor],
        calculate_per_token_loss: bool,
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...


class ModelProvider(Protocol):
    def __call__(
        self, pre_process: bool, post_process: bool, vp_stage: int | None = None
    ) -> Any: ...


class MegatronInit(Protocol):
    def __call__(self, args: Args) -> None: ...


class BeforeLogProbHook(Protocol):
    def __call__(self, args: Args, model: Any, store_prefix: str) -> None: ...


class BeforeTrainStepHook(Protocol):
    def __call__(
        self,
        args: Args,
        rollout_id: int,
        step_id: int,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
    ) -> None: ...
