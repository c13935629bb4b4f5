"""Batches from rollout to loss: RolloutBatch, TrainBatch, the arguments of a loss, and metrics over ranks.

Sample ─▶ RolloutBatch, the rows of one rank ─core/packing.py─▶ TrainBatch, one micro-batch ─▶ LossInputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # processes that only forward records start without torch
    import torch

# RolloutBatch columns by kind: one number per row, or one 1-D array per row.
_SCALAR_DTYPES = {
    "response_lens": np.int32,
    "rewards": np.float32,
    "raw_rewards": np.float32,
    "truncated": np.int8,
    "group_indices": np.int64,
    "sample_indices": np.int64,
    "trajectory_ids": np.int64,
    "num_trajectories": np.int64,
    "logged": np.int8,
}
_RESPONSE_DTYPES = {
    "loss_masks": np.int8,
    "loss_weights": np.float32,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
    "old_log_probs": np.float32,
    "ref_log_probs": np.float32,
    "values": np.float32,
    "advantages": np.float32,
    "returns": np.float32,
}
_RAGGED = {
    "tokens": np.int32,
    **_RESPONSE_DTYPES,
    "routed_experts": np.int16,
    "positions": np.int32,
    "images": np.int32,
}


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """One image as a vision tower takes it, and its patches in time, rows and columns."""

    values: np.ndarray  # [patches, values of a patch] float32
    grid: tuple[int, int, int]  # (1, 4, 8): 32 patches
    key: str  # hash of the file


@dataclass(kw_only=True)
class RolloutBatch:
    """Rows of scored responses as columns of 1-D numpy arrays, sent from rollout to trainer.

    Two rows, "1+1=" -> "2" and "3" -> "4 5"::

        tokens        = [int32[5, 9, 5, 7, 6, 0], int32[7, 8, 1, 9, 0]]
        response_lens = int32[2, 4]
        loss_masks    = [int8[1, 1], int8[1, 1, 1, 1]]
        rewards       = float32[0.7, -0.7]     after normalisation by group
        raw_rewards   = float32[1.0, 0.0]
        loss_weights  = [float32[.25, .25], float32[.125, .125, .125, .125]]

    `loss_weights` is the weight of each response token in the loss of its optimizer step, taken over
    the whole global batch. It is computed before rows are distributed over ranks and micro-batches, so
    the loss does not depend on the distribution. The trainer fills in the columns from
    `old_log_probs` to `returns`.
    """

    tokens: list[np.ndarray]  # N x [P+R] int32
    response_lens: np.ndarray  # [N] int32
    loss_masks: list[np.ndarray]  # N x [R] int8
    rewards: np.ndarray  # [N] float32
    raw_rewards: np.ndarray  # [N] float32
    truncated: np.ndarray  # [N] int8
    group_indices: np.ndarray  # [N] int64
    sample_indices: np.ndarray  # [N] int64
    trajectory_ids: np.ndarray  # [N] int64: the rollout_id of each sample
    num_trajectories: np.ndarray | None = None  # [N] int64: in the row's step
    loss_weights: list[np.ndarray] | None = None  # N x [R]
    rollout_log_probs: list[np.ndarray] | None = None  # N x [R]
    teacher_log_probs: list[np.ndarray] | None = None  # N x [R]
    old_log_probs: list[np.ndarray] | None = None  # N x [R]
    ref_log_probs: list[np.ndarray] | None = None  # N x [R]
    values: list[np.ndarray] | None = None  # N x [R]
    advantages: list[np.ndarray] | None = None  # N x [R]
    returns: list[np.ndarray] | None = None  # N x [R]
    routed_experts: list[np.ndarray] | None = None  # N x [P+R, layers, experts per token], -1: any
    # set together, in a batch with images
    positions: list[np.ndarray] | None = None  # N x [P+R, 3]: in time, row and column
    images: list[np.ndarray] | None = None  # N x [images, 3]: index in pixels, first token, tokens
    pixels: list[Pixels] | None = None  # distinct images; rows may share them
    metadata: list[dict[str, Any] | None] | None = None  # Sample.train_metadata of each row
    logged: np.ndarray | None = None  # [N] int8: 1 for rows whose tokens the run folder keeps
    schedule: Schedule | None = None  # row indices of this batch by optimizer step and micro-batch

    @property
    def rollout_ids(self) -> np.ndarray:
        """Return `trajectory_ids` under the name that hooks use."""
        return self.trajectory_ids

    @rollout_ids.setter
    def rollout_ids(self, value: np.ndarray) -> None:
        self.trajectory_ids = value

    @property
    def executions(self) -> np.ndarray | None:
        """Return `num_trajectories` under the name that hooks use."""
        return self.num_trajectories

    def __post_init__(self) -> None:
        for name, dtype in _SCALAR_DTYPES.items():
            column = getattr(self, name)
            if column is not None:
                setattr(self, name, np.asarray(column, dtype=dtype))
        for name, dtype in _RAGGED.items():
            column = getattr(self, name)
            if column is not None:
                setattr(self, name, [np.asarray(row, dtype=dtype) for row in column])
        self.check()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lens(self) -> list[int]:
        """Return the number of prompt and response tokens of each row."""
        return [len(row) for row in self.tokens]

    def check(self) -> None:
        """Raise ValueError unless every column has one entry per row, each of the right length."""
        count = len(self.tokens)
        for name in [*_SCALAR_DTYPES, *_RAGGED, "metadata"]:
            column = getattr(self, name)
            if column is not None and len(column) != count:
                raise ValueError(f"column {name} has {len(column)} rows, tokens has {count}")
        for name in _RESPONSE_DTYPES:
            for row, values in enumerate(getattr(self, name) or ()):
                if len(values) != self.response_lens[row]:
                    raise ValueError(
                        f"row {row}: {name} has {len(values)} entries "
                        f"for {self.response_lens[row]} response tokens"
                    )
        for name in ("routed_experts", "positions"):
            for row, values in enumerate(getattr(self, name) or ()):
                if len(values) != len(self.tokens[row]):
                    raise ValueError(
                        f"row {row}: {name} has {len(values)} entries for {len(self.tokens[row])} tokens"
                    )
        for row, tokens in enumerate(self.tokens):
            if not 0 < self.response_lens[row] < len(tokens):
                raise ValueError(
                    f"row {row}: {self.response_lens[row]} response tokens of {len(tokens)}; "
                    "a row needs at least one prompt and one response token"
                )

    def select(self, rows: list[int], schedule: Schedule | None = None) -> RolloutBatch:
        """Return a batch of the given rows, with the images that they need."""
        columns: dict[str, Any] = {}
        for f in fields(self):
            column = getattr(self, f.name)
            if f.name in ("schedule", "pixels") or column is None:
                continue
            columns[f.name] = (
                column[rows] if f.name in _SCALAR_DTYPES else [column[i] for i in rows]
            )
        if self.images is not None and self.pixels is not None:
            chosen = columns["images"]
            needed = sorted({int(index) for row in chosen for index in row[:, 0]})
            columns["pixels"] = [self.pixels[index] for index in needed]
            columns["images"] = [
                np.column_stack([np.searchsorted(needed, row[:, 0]), row[:, 1:]]) for row in chosen
            ]
        return RolloutBatch(**columns, schedule=schedule)

    def __getstate__(self) -> dict[str, Any]:
        """Flatten each column into one buffer, so that sending a batch has no cost per row."""
        state = dict(self.__dict__)
        for name in _RAGGED:
            column = state[name]
            if column is not None:
                flat = np.concatenate(column) if column else np.empty(0, _RAGGED[name])
                state[name] = (flat, np.array([len(row) for row in column], np.int64))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in _RAGGED:
            if state[name] is not None:
                flat, lens = state[name]
                state[name] = np.split(flat, np.cumsum(lens)[:-1]) if len(lens) else []
        self.__dict__.update(state)


@dataclass(kw_only=True, frozen=True)
class CriticColumns:
    """What actor and critic exchange about the rows of one rank: N x [R] each.

    The critic sends `values`; the actor returns them with the `returns` computed from them::

        values  = [float32[0.2, 0.4]]     of one row with two response tokens and reward 1
        returns = [float32[1.0, 1.0]]
    """

    values: list[np.ndarray]
    returns: list[np.ndarray] | None = None


@dataclass(kw_only=True, frozen=True)
class Schedule:
    """Which rows of a rank's batch form which micro-batch of which optimizer step.

    `steps[k]` are the micro-batches of step k, each a list of row indices. Every rank has the same
    number of steps and of micro-batches per step, as collective operations need; a rank that has no
    row left for a micro-batch runs a dummy, which repeats a row with weight 0.
    `log_prob_micro_batches` covers the same rows once, split by the budget of forward-only passes.

        steps = [[[0, 2], [1]], [[3], [4]]]     two steps of two micro-batches each
    """

    steps: list[list[list[int]]]
    log_prob_micro_batches: list[list[int]]
    # (step, micro-batch) of the dummies; step -1 is the log-prob pass
    dummies: frozenset[tuple[int, int]] = frozenset()


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

    With images, the vision tower computes each distinct image once. For images A, B, A in packed order::

        pixel_values = patches of A, then of B
        image_grids  = [[1, 4, 8], [1, 2, 2]]
        image_order  = [0, 1, 0]
        image_mask   = True at the tokens of A, B and A
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
    dummy: bool = False  # repeats a row with weight 0, see Schedule
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
    mrope_positions: torch.Tensor | None = None  # [T, 3] int64: in time, row and column
    image_mask: torch.Tensor | None = None  # [T] bool: tokens that are replaced by image features
    pixel_values: torch.Tensor | None = None  # [patches, values of a patch] float32
    image_grids: torch.Tensor | None = None  # [distinct images, 3] int64
    image_keys: list[str] | None = None  # hashes of the distinct images
    image_order: list[int] | None = None  # row of image_grids for each image in packed order

    @property
    def total_lens(self) -> list[int]:
        """Return the number of prompt and response tokens of each row."""
        return [p + r for p, r in zip(self.prompt_lens, self.response_lens, strict=True)]

    def as_dummy(self) -> TrainBatch:
        zeros = self.loss_mask * 0
        ahead = None if self.mtp_weights is None else self.mtp_weights * 0
        return replace(self, dummy=True, loss_mask=zeros, loss_weights=zeros, mtp_weights=ahead)

    def to(self, device: torch.device | str) -> TrainBatch:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: value for name, value in columns.items() if hasattr(value, "to")}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})


@dataclass(kw_only=True)
class LossInputs:
    """Inputs of a loss function: one packed micro-batch of T tokens. All but `cu_seqlens` are [T].

    Only `loss_mask` says which tokens are trained on: `rollout_log_probs` also has values elsewhere.
    """

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
    """Sum each metric over parts (micro-batches, steps, ranks); a part may lack some metrics."""
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
