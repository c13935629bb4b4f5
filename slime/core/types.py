"""Records shared by all packages: samples and reports here, batches in rollout_batch.py and train_batch.py.

Shape letters used across the project: N samples, G group size, T packed tokens, R response tokens,
V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from slime.core.rollout_batch import CriticColumns, RolloutBatch, Schedule
from slime.core.train_batch import LossInputs, LossOutput, MetricSum, TrainBatch

__all__ = [
    "CriticColumns", "EngineInfo", "Group", "LossInputs", "LossOutput", "MetricSum", "ModelAddress", "ParallelInfo",
    "RolloutBatch", "Sample", "Schedule", "Status", "TrainBatch",
]  # fmt: skip


class Status(str, Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


# Fields that may hold nested lists and dictionaries.
_NESTED = ("prompt", "label", "metadata", "train_metadata", "multimodal_inputs", "reward")


@dataclass(kw_only=True)
class Sample:
    """One response to one prompt; what user hooks see, so the field names are public.

    Example: the prompt "1+1=" is tokens [5, 9, 5, 7]; the response "2" is [6], then end-of-text [0]::

        tokens = [5, 9, 5, 7, 6, 0]      prompt and response
        response_length = 2              the last two of them
        loss_mask = [1, 1]               one entry per response token
        rollout_log_probs = [-0.7, -0.1] of each response token, from the engine
        weight_versions = [3, 3]         of the weights that generated each response token
    """

    # set by the data source
    group_index: int | None = None  # which prompt of the run; the samples of a group share it
    index: int | None = None  # unique per sample over the whole run
    rollout_id: int | None = None  # the trajectory it came from; default: index
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
    remove_sample: bool = False  # counts in statistics, has weight 0 in training
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

        Tokens that the model did not generate (tool output) are `trainable=False`; their log-probs
        default to 0.
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

    def clone(self) -> Sample:
        """Return a copy with copies of its lists and dictionaries, nested ones too."""
        clone = object.__new__(type(self))
        for name, value in self.__dict__.items():
            if name in _NESTED:
                value = _copied(value)
            clone.__dict__[name] = value.copy() if isinstance(value, list) else value
        return clone

    def get_reward_value(self, key: str | None) -> float:
        """Return the scalar reward: `reward` itself, or `reward[key]` if it is a dictionary."""
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


def _copied(value: Any) -> Any:
    """Copy lists and dictionaries; other objects that a hook stores, such as a connection, are shared."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


Group = list[Sample]  # the samples of one prompt


@dataclass(kw_only=True, frozen=True)
class ParallelInfo:
    """The coordinates of one rank in the training layout. DP2 x CP2, third rank: dp_rank=1, cp_rank=0."""

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
    """The address of one inference engine and its devices ("cpu", or GPU uuids)."""

    url: str
    device_ids: tuple[str, ...] = ("cpu",)
    kind: str = "slime"  # "slime" or "sglang"
    version: str = ""  # of the server, for external engines
    role: str = "regular"  # or "prefill" or "decode", which serve requests together
    bootstrap_port: int | None = None  # of a prefill engine


@dataclass(kw_only=True, frozen=True)
class ModelAddress:
    """Where the requests for one served model go: to its engines, or to the router in front of them."""

    urls: list[str]
    router: str | None = None


# ---- results that actors return to the driver


@dataclass(kw_only=True)
class RolloutResult:
    """Result of one generate call: references for the trainer, metrics for the user."""

    batch_refs: list[Any] = field(default_factory=list)  # one per data-parallel rank
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, frozen=True)
class TrainReport:
    """Result of one call of `train`, equal on every rank."""

    metrics: dict[str, float]


@dataclass(kw_only=True, frozen=True)
class Probe:
    """Log-probs of tokens[1:], each given all tokens before it, as computed by the trainer."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    temperature: float
    tolerance: float  # largest difference that rounding can cause


@dataclass(kw_only=True, frozen=True)
class SyncReport:
    """One weight update. 248 MB in 0.5 s, of which 0.1 s are checksums: 0.496 GB/s and 20 %."""

    version: int
    nbytes: int
    num_tensors: int
    num_buckets: int
    num_engines: int
    seconds: float
    checksum_seconds: float  # own checksums, and waiting for the engines'
    probe: Probe | None = None  # for engines whose checksums do not show everything

    def metrics(self) -> dict[str, float]:
        return {
            "perf/update_weights_bytes": float(self.nbytes),
            "perf/update_weights_seconds": self.seconds,
            "perf/update_weights_checksum_seconds": self.checksum_seconds,
            "perf/update_weights_gb_per_s": self.nbytes / max(self.seconds, 1e-9) / 1e9,
            "perf/weight_version": float(self.version),
        }

    def __str__(self) -> str:
        share = 100 * self.checksum_seconds / max(self.seconds, 1e-9)
        return (
            f"weights {self.version}: {self.nbytes / 1e6:.1f} MB in {self.num_buckets} buckets to "
            f"{self.num_engines} engines in {self.seconds:.3f} s "
            f"({self.nbytes / max(self.seconds, 1e-9) / 1e9:.2f} GB/s, checksums {share:.0f} %)"
        )
