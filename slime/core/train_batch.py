"""TrainBatch, one packed micro-batch; the inputs and outputs of the loss; metrics reduced over ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes that only pass records on start without torch
    import torch


from collections.abc import Callable, Iterable, Mapping


@dataclass(kw_only=True, frozen=True)
class MetricSum:
    """A mean as sum and count, which add up: (total=6, count=3) + (total=2, count=1) has mean 8/4."""

    total: float
    count: float

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(total=self.total + other.total, count=self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(kw_only=True)
class TrainBatch:
    """One packed micro-batch, the same for both trainers: rows concatenated into one sequence.

    A value of response token j of a row with P prompt tokens is at position P+j-1, the position
    whose output predicts that token; `labels` holds the predicted token there. For rows
    [5, 9 | 6, 0] and [7 | 8] (prompt | response)::

        tokens       = [5, 9, 6, 0, 7, 8]
        position_ids = [0, 1, 2, 3, 0, 1]
        cu_seqlens   = [0, 4, 6]
        labels       = [9, 6, 0, 0, 8, 0]        the last token of a row has no label
        loss_mask    = [0, 1, 1, 0, 1, 0]
        loss_weights = [0, .25, .25, 0, .5, 0]   already divided by lengths and global batch

    With multi-token prediction, `mtp_labels[k]` is the token that is k+2 positions ahead and
    `mtp_weights[k]` its entry of `loss_weights`; both are 0 where the row has ended::

        mtp_labels   = [[6, 0, 0, 0, 0, 0]]
        mtp_weights  = [[.25, .25, 0, 0, 0, 0]]

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
    num_trajectories: int = 1  # in the optimizer step, on all ranks
    dummy: bool = (
        False  # repeats a row with weight 0, so that all ranks run equally many micro-batches
    )
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    old_log_probs: torch.Tensor | None = None  # [T]
    ref_log_probs: torch.Tensor | None = None  # [T]
    rollout_log_probs: torch.Tensor | None = None  # [T]
    teacher_log_probs: torch.Tensor | None = None  # [T]
    routed_experts: torch.Tensor | None = None  # [T, layers, experts per token]
    mtp_labels: torch.Tensor | None = None  # [MTP layers, T] int64
    mtp_weights: torch.Tensor | None = None  # [MTP layers, T] float32

    def as_dummy(self) -> TrainBatch:
        zeros = self.loss_mask * 0
        ahead = None if self.mtp_weights is None else self.mtp_weights * 0
        return replace(self, dummy=True, loss_mask=zeros, loss_weights=zeros, mtp_weights=ahead)

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
    """Inputs of a loss function: tensors [T] of one packed micro-batch, zero where the mask is zero."""

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
    """The loss of one micro-batch, a sum that adds up over micro-batches and ranks, and its metrics."""

    loss: torch.Tensor
    metrics: dict[str, MetricSum]


Sums = Mapping[str, MetricSum]
Maxima = Mapping[str, float]
Gather = Callable[[object], list]  # all-gather of one object per rank


def add_up(parts: Iterable[Sums]) -> dict[str, MetricSum]:
    """Sum each metric over parts (micro-batches, steps, ranks), of which some may lack it."""
    totals: dict[str, MetricSum] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


def reduce_metrics(sums: Sums, maxima: Maxima | None = None, *, gather: Gather) -> dict[str, float]:
    """Return the means of the sums and the largest of the maxima over all ranks, on every rank.

    Ranks (0.5+0.5)/2 and 0.8/1 give mean 0.6, not 0.65. A sum with count 0 is omitted.
    """
    gathered = gather((dict(sums), dict(maxima or {})))
    means = {k: v.mean for k, v in add_up(part for part, _ in gathered).items() if v.count}
    largest: dict[str, float] = {}
    for _, part in gathered:
        for name, value in part.items():
            largest[name] = max(value, largest[name]) if name in largest else value
    return means | largest


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Prefix the names: {"loss": 1.0} under "train" is {"train/loss": 1.0}."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
