"""What a training backend fills in; the step around it is written once, in base.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch.distributed as dist

from slime.backends.step import StepResult
from slime.core.errors import UserError
from slime.core.types import ParallelInfo, RolloutBatch, TrainBatch
from slime.runlog.export_folder import ExportInfo
from slime.weights.buckets import HFTensors

if TYPE_CHECKING:
    from slime.config.arguments import Args

HFBucket = HFTensors  # (Hugging Face name, whole tensor) of one bucket
ModelName = Literal["actor", "ref", "teacher"]


class Backend(ABC):
    """One rank of it."""

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
        """Join the process group, build and load the model; the rollout id to start with.

        `checkpoint` is the folder of one checkpoint (`iter_0000019`) to resume from.
        """

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different rows, one of each model replica; None for a single one."""
        return dist.group.WORLD if self.parallel.dp_size > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold parts of the same rows; None for a single one."""
        return None

    @abstractmethod
    def log_probs(self, batch: RolloutBatch, model: ModelName) -> list[np.ndarray]:
        """Log-probs of the response tokens of every row under one of the models: N x [R].

        "teacher" is the model of --opd-teacher-load, which `init` loads with `with_opd_teacher`.
        """

    def update_ref(self) -> None:
        """Make the reference model a copy of the actor, and from now on a part of checkpoints."""
        raise UserError(f"--ref-update-interval does not work with {type(self).__name__}")

    @abstractmethod
    def train_step(
        self, rollout_id: int, step_id: int, micro_batches: list[TrainBatch]
    ) -> StepResult:
        """One optimizer step. Calls `loss` once per micro-batch; their losses add up over ranks too."""

    @abstractmethod
    def save(self, rollout_id: int, path: str, force_sync: bool = False) -> None:
        """Write this rank's share of a checkpoint into the folder `path`, which exists."""

    @abstractmethod
    def wait_save(self) -> None:
        """Return once a save in the background has finished; raise what it raised."""

    @abstractmethod
    def load(self, path: str) -> int:
        """Continue from a checkpoint folder; the rollout id it was saved after."""

    @abstractmethod
    def hf_buckets(self) -> Iterator[HFBucket]:
        """(Hugging Face name, whole tensor) lists of at most --update-weight-buffer-size bytes each."""

    @abstractmethod
    def export_hf(self, path: str, info: ExportInfo | None = None) -> None:
        """Write the current weights as a Hugging Face folder, marked with `info`."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Leave to the engines what only the next step needs; it begins by zeroing them."""

    @abstractmethod
    def sleep(self) -> None:
        """Leave the GPU's memory to the engines."""

    @abstractmethod
    def wake_up(self) -> None:
        """Undo `sleep`."""
