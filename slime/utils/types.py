"""The nouns every part of slime shares; data only, no behaviour beyond keeping themselves consistent.

Shape letters used across the project: N samples, G group size, T packed tokens, R response tokens,
V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # processes that only hand records on start without it
    import torch


class Status(str, Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(kw_only=True)
class Sample:
    """One response to one prompt; what user hooks see, so the field names are public.

    Example: the prompt "1+1=" is tokens [5, 9, 5, 7]; the response "2" is [6], then end-of-text [0]::

        tokens = [5, 9, 5, 7, 6, 0]      prompt and response together
        response_length = 2              the last two of them
        loss_mask = [1, 1]               one entry per response token
        rollout_log_probs = [-0.7, -0.1] what the engine gave each response token
        weight_versions = [3, 3]         the weights that produced each response token
    """

    # set by the data source
    group_index: int | None = None  # which prompt of the run; siblings share it
    index: int | None = None  # unique per sample over the whole run
    rollout_id: int | None = None  # the execution this came from; default: index
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    multimodal_inputs: dict[str, Any] | None = None
    # set by generation
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None  # None: every response token is trained on
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: np.ndarray | None = None
    weight_versions: list[int] = field(default_factory=list)
    status: Status = Status.PENDING
    # set by scoring and filtering
    reward: float | dict[str, Any] | None = None
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False  # kept for the statistics, trained on with weight 0
    train_metadata: dict[str, Any] | None = None

    Status = Status

    def append_response_tokens(
        self,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        weight_versions: list[int] | None = None,
    ) -> None:
        """Add tokens to the response, keeping tokens, loss mask, log-probs and versions aligned.

        Tokens the model did not produce (tool output) are `trainable=False`; their log-probs may be
        left out and become 0.
        """
        count = len(tokens)
        if log_probs is None and trainable:
            raise ValueError("trainable tokens need the log-probs they were sampled with")
        log_probs = [0.0] * count if log_probs is None else log_probs
        if weight_versions is None:
            weight_versions = [self.weight_versions[-1] if self.weight_versions else 0] * count
        for name, column in (("log_probs", log_probs), ("weight_versions", weight_versions)):
            if len(column) != count:
                raise ValueError(f"{count} tokens but {len(column)} {name}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = self.tokens + list(tokens)
        self.response_length += count
        self.loss_mask += [int(trainable)] * count
        self.rollout_log_probs += log_probs
        self.weight_versions += weight_versions

    def get_reward_value(self, key: str | None) -> float:
        """The scalar the trainer uses: `reward` itself, or `reward[key]` when it is a dictionary."""
        if isinstance(self.reward, dict):
            if key is None or key not in self.reward:
                raise KeyError(
                    f"the reward is a dictionary with keys {sorted(self.reward)}; "
                    f"--reward-key is {key!r}: set it to one of them"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward")
        return float(self.reward)

    def to_dict(self) -> dict[str, Any]:
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["status"] = self.status.value
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Sample:
        return cls(**{**record, "status": Status(record["status"])})


Group = list[Sample]  # siblings of one prompt

# RolloutBatch columns by kind: one number per row, or one 1-D array per row.
_SCALAR_DTYPES = {
    "response_lens": np.int32,
    "rewards": np.float32,
    "raw_rewards": np.float32,
    "truncated": np.int8,
    "group_indices": np.int64,
    "sample_indices": np.int64,
    "rollout_ids": np.int64,
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
    """Rows of scored responses as columns of 1-D numpy arrays: what crosses from rollout to trainer.

    Two rows, "1+1=" -> "2" and "3" -> "4 5"::

        tokens        = [int32[5, 9, 5, 7, 6, 0], int32[7, 8, 1, 9, 0]]
        response_lens = int32[2, 4]
        loss_masks    = [int8[1, 1], int8[1, 1, 1, 1]]
        rewards       = float32[0.7, -0.7]     after normalisation by group
        raw_rewards   = float32[1.0, 0.0]
        loss_weights  = [float32[.25, .25], float32[.125, .125, .125, .125]]

    `loss_weights` is the weight of each response token in the loss of its optimizer step, taken over
    the whole global batch. It is fixed before rows are spread over ranks and micro-batches, which is
    why the loss cannot depend on how they are spread. The columns from `old_log_probs` on are filled
    by the trainer.
    """

    tokens: list[np.ndarray]  # N x [P+R] int32
    response_lens: np.ndarray  # [N] int32
    loss_masks: list[np.ndarray]  # N x [R] int8
    rewards: np.ndarray  # [N] float32
    raw_rewards: np.ndarray  # [N] float32
    truncated: np.ndarray  # [N] int8
    group_indices: np.ndarray  # [N] int64
    sample_indices: np.ndarray  # [N] int64
    rollout_ids: np.ndarray  # [N] int64
    loss_weights: list[np.ndarray] | None = None  # N x [R]
    rollout_log_probs: list[np.ndarray] | None = None  # N x [R]
    teacher_log_probs: list[np.ndarray] | None = None  # N x [R]
    old_log_probs: list[np.ndarray] | None = None  # N x [R]
    ref_log_probs: list[np.ndarray] | None = None  # N x [R]
    values: list[np.ndarray] | None = None  # N x [R]
    advantages: list[np.ndarray] | None = None  # N x [R]
    returns: list[np.ndarray] | None = None  # N x [R]
    routed_experts: list[np.ndarray] | None = None  # N x [P+R, layers, experts per token], -1: free
    metadata: list[dict[str, Any] | None] | None = None
    schedule: Schedule | None = None  # row indices of this batch by optimizer step and micro-batch

    def __post_init__(self) -> None:
        for name, dtype in _SCALAR_DTYPES.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype=dtype))
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
        """Every column has one entry per row, and every row the length its kind asks for."""
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
        """The given rows as a batch of their own."""
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
        """One flat buffer per column, so that a batch moves between processes without per-row cost."""
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
    """What actor and critic tell each other about the rows of one rank: N x [R] each.

    The critic gives `values` alone; the actor gives them back with the `returns` they led to::

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
    row left for a micro-batch repeats a row listed in `fillers` there, which counts for nothing.
    `log_prob_micro_batches` covers the same rows once, cut by the budget of forward-only passes.

        steps = [[[0, 2], [1]], [[3], [4]]]     two steps of two micro-batches each
    """

    steps: list[list[list[int]]]
    log_prob_micro_batches: list[list[int]]
    fillers: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (step, micro-batch); -1 as step: log-prob pass


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


@dataclass(kw_only=True, frozen=True)
class ParallelInfo:
    """Where one rank stands in the training layout. DP2 x CP2, third rank: dp_rank=1, cp_rank=0."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass(kw_only=True, frozen=True)
class EngineInfo:
    """How to reach one inference engine, and which device it sits on ("cpu", or a GPU's uuid)."""

    url: str
    device_ids: tuple[str, ...] = ("cpu",)
    kind: str = "slime"  # "slime" or "sglang"
