"""RolloutBatch, which goes from rollout to trainer, and the schedule in which it is trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

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
}
_TOTAL_DTYPES = {"tokens": np.int32}
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
_RAGGED = {**_TOTAL_DTYPES, **_RESPONSE_DTYPES, "routed_experts": np.int16}


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
    `old_log_probs` on.
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
    metadata: list[dict[str, Any] | None] | None = None
    schedule: Schedule | None = None  # row indices of this batch by optimizer step and micro-batch

    @property
    def rollout_ids(self) -> np.ndarray:
        """Return `trajectory_ids` under the name by which hooks know it."""
        return self.trajectory_ids

    @rollout_ids.setter
    def rollout_ids(self, value: np.ndarray) -> None:
        self.trajectory_ids = value

    @property
    def executions(self) -> np.ndarray | None:
        """Return `num_trajectories` under the name by which hooks know it."""
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
        for row, experts in enumerate(self.routed_experts or ()):
            if len(experts) != len(self.tokens[row]):
                raise ValueError(
                    f"row {row}: experts of {len(experts)} tokens for {len(self.tokens[row])} tokens"
                )
        for row, tokens in enumerate(self.tokens):
            if not 0 < self.response_lens[row] < len(tokens):
                raise ValueError(
                    f"row {row}: {self.response_lens[row]} response tokens of {len(tokens)}; "
                    "a row needs at least one prompt and one response token"
                )

    def select(self, rows: list[int], schedule: Schedule | None = None) -> RolloutBatch:
        """Return a batch of the given rows."""
        columns: dict[str, Any] = {}
        for f in fields(self):
            column = getattr(self, f.name)
            if f.name == "schedule" or column is None:
                continue
            columns[f.name] = (
                column[rows] if f.name in _SCALAR_DTYPES else [column[i] for i in rows]
            )
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
