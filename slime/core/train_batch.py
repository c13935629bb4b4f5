"""What a trainer's forward pass and its loss work on: one packed micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that only hand records on start without it
    import torch


@dataclass(kw_only=True, frozen=True)
class MetricSum:
    """A mean that can still be added up: MetricSum(total=6, count=3) + MetricSum(total=2, count=1) is 8/4."""

    total: float
    count: float

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(total=self.total + other.total, count=self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(kw_only=True)
class TrainBatch:
    """One packed micro-batch, the same for both trainers. Rows lie end to end in one sequence.

    A value belonging to response token j of a row with P prompt tokens stands at position P+j-1, the
    position whose output predicts that token; `labels` holds the predicted token there. For rows
    [5, 9 | 6, 0] and [7 | 8] (prompt | response)::

        tokens       = [5, 9, 6, 0, 7, 8]
        position_ids = [0, 1, 2, 3, 0, 1]
        cu_seqlens   = [0, 4, 6]
        labels       = [9, 6, 0, 0, 8, 0]        the last of a row predicts nothing
        loss_mask    = [0, 1, 1, 0, 1, 0]
        loss_weights = [0, .25, .25, 0, .5, 0]   already divided by lengths and global batch

    With context parallelism each rank holds its zigzag slice of these columns.
    """

    tokens: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64
    labels: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] float32
    loss_weights: torch.Tensor  # [T] float32
    cu_seqlens: torch.Tensor  # [rows+1] int32
    max_seqlen: int
    rows: list[int]  # rows of the RolloutBatch, in packing order
    prompt_lens: list[int]
    response_lens: list[int]
    executions: int = 1  # of the optimizer step, on all ranks
    filler: bool = False  # repeats rows to keep ranks in step, and counts for nothing
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    old_log_probs: torch.Tensor | None = None  # [T]
    ref_log_probs: torch.Tensor | None = None  # [T]
    rollout_log_probs: torch.Tensor | None = None  # [T]
    teacher_log_probs: torch.Tensor | None = None  # [T]
    routed_experts: torch.Tensor | None = None  # [T, layers, experts per token]

    def as_filler(self) -> TrainBatch:
        zeros = self.loss_mask * 0
        return replace(self, filler=True, loss_mask=zeros, loss_weights=zeros)

    def to(self, device: torch.device | str) -> TrainBatch:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return TrainBatch(
            **{
                name: value.to(device) if hasattr(value, "to") else value
                for name, value in columns.items()
            }
        )


@dataclass(kw_only=True)
class LossInputs:
    """What a loss sees of one packed micro-batch; every tensor is [T], zero where the mask is zero."""

    log_probs: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor
    cu_seqlens: torch.Tensor
    entropy: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    values: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None


@dataclass(kw_only=True)
class LossOutput:
    """The loss of one micro-batch: a sum that adds up over micro-batches and ranks, and its metrics."""

    loss: torch.Tensor
    metrics: dict[str, MetricSum]
