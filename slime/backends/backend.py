"""The interface of a training backend; base.py implements the training step on top of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch.distributed as dist

from slime.core.errors import UserError
from slime.core.train_batch import add_up
from slime.core.types import MetricSum, ParallelInfo, RolloutBatch, TrainBatch
from slime.runlog.export_folder import ExportInfo
from slime.weights.buckets import HFTensors

if TYPE_CHECKING:
    from slime.config.arguments import Args

HFBucket = HFTensors  # (Hugging Face name, full tensor) pairs of one bucket
ModelName = Literal["actor", "ref", "teacher"]


@dataclass(kw_only=True)
class StepResult:
    """Metrics and log-probs of one optimizer step on this rank."""

    metrics: dict[str, MetricSum] = field(default_factory=dict)
    log_probs: dict[int, np.ndarray] = field(default_factory=dict)  # row -> [R], before the step

    def add(self, metrics: dict[str, MetricSum]) -> None:
        self.metrics = add_up([self.metrics, metrics])


class Backend(ABC):
    """One rank of a training backend."""

    parallel: ParallelInfo

    @abstractmethod
    def init(
        self,
        args: Args | None = None,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        checkpoint: str | None = None,
    ) -> int:
        """Join the process group, build and load the model; return the first rollout id.

        `checkpoint` is the folder of one checkpoint (`iter_0000019`) to resume from.
        """

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Data-parallel group: ranks with different rows, one per replica; None for one rank."""
        return dist.group.WORLD if self.parallel.dp_size > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """Context-parallel group: ranks with slices of the same rows; None for one rank."""
        return None

    @abstractmethod
    def log_probs(self, batch: RolloutBatch, model: ModelName) -> list[np.ndarray]:
        """Return the log-probs of every row's response tokens under one of the models: N x [R].

        "teacher" is the model of --opd-teacher-load, which `init` loads with `with_opd_teacher`.
        """

    def update_ref(self) -> None:
        """Copy the actor's weights into the reference model, which checkpoints then include."""
        raise UserError(f"--ref-update-interval does not work with {type(self).__name__}")

    @abstractmethod
    def train_step(
        self, rollout_id: int, step_id: int, micro_batches: list[TrainBatch]
    ) -> StepResult:
        """Run one optimizer step; its loss is the sum of `loss` over micro-batches and ranks."""

    @abstractmethod
    def save_to(self, path: str, rollout_id: int, force_sync: bool = False) -> None:
        """Write this rank's part of a checkpoint into the existing folder `path`."""

    @abstractmethod
    def wait_write(self) -> None:
        """Wait for a background save to finish and re-raise its exception, if any."""

    @abstractmethod
    def load(self, path: str) -> int:
        """Load a checkpoint folder; return the id of the last rollout before it was saved."""

    @abstractmethod
    def hf_buckets(self) -> Iterator[HFBucket]:
        """Yield buckets of (HF name, full tensor), each up to --update-weight-buffer-size bytes."""

    @abstractmethod
    def export_hf(self, path: str, info: ExportInfo | None = None) -> None:
        """Write the current weights as a Hugging Face folder and record `info` in it."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Free the gradients for the engines' use; the next step starts by zeroing them anyway."""

    @abstractmethod
    def sleep(self) -> None:
        """Offload to host memory, so that engines can use the GPU's."""

    @abstractmethod
    def wake_up(self) -> None:
        """Reload what `sleep` offloaded."""
