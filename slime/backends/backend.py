"""The interface of a training backend; base.py implements the training step on top of it.

`Offloaded` is what both backends implement `sleep` and `wake_up` with: it moves the storage of GPU
tensors to host memory and back, without replacing the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from slime.core.batches import add_up
from slime.core.errors import UserError
from slime.core.types import MetricSum, ParallelInfo, RolloutBatch, TrainBatch
from slime.runlog.export_folder import ExportInfo
from slime.utils.device import device_type
from slime.weights.buckets import HFTensors

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
    _offloaded: Offloaded | None = None  # by `sleep`

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
        """Free the gradients' GPU memory for engines; the next step starts from zero gradients."""

    @abstractmethod
    def sleep(self) -> None:
        """Offload to host memory, so that engines can use GPU memory. Gradients are freed instead:
        nothing reads them between rollouts."""

    def wake_up(self) -> None:
        """Reload what `sleep` offloaded."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def require_awake(self) -> None:
        if self._offloaded is not None:
            raise RuntimeError("the trainer sleeps: its weights are in host memory")


class Offloaded:
    """Contents of tensors in pinned host memory while their GPU storage is resized to 0.

    Only storages are resized, so that parameters, their views and optimizer state keep pointing at
    them. CPU tensors are skipped, since offloading them frees no GPU memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.is_cuda
        }
        self._kept = [
            (s, torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage())
            for s in storages.values()
            if s.nbytes()
        ]
        for storage, copy in self._kept:
            copy.copy_(storage, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
            for storage, _ in self._kept:
                storage.resize_(0)
        return_unused()

    @property
    def nbytes(self) -> int:
        """Bytes of pinned host memory in use, before the allocator's rounding."""
        return sum(copy.nbytes() for _, copy in self._kept)

    def restore(self) -> None:
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        self._kept = []


def return_unused() -> None:
    """Release torch's cached GPU memory, so that other processes can allocate it."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


# ---- images

MOST_BYTES = 256 << 20  # limit of one tower's cached outputs


class FeatureCache:
    """Cached outputs of a frozen vision tower.

    The reference, old-log-prob and training passes encode the same images, and the samples of a group
    share images across micro-batches.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._held: OrderedDict[str, torch.Tensor] = OrderedDict()  # [1 + D, tokens, H] by content
        self._most_bytes, self._num_bytes = most_bytes, 0

    def clear(self) -> None:
        self._held.clear()
        self._num_bytes = 0

    @torch.no_grad()
    def features(self, tower: Any, batch: TrainBatch, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return embeddings and deepstack features [tokens, H] of a micro-batch's different images."""
        assert batch.pixel_values is not None and batch.image_grids is not None
        assert batch.image_keys is not None
        found = {key: self._held[key] for key in batch.image_keys if key in self._held}
        missing = [n for n, key in enumerate(batch.image_keys) if key not in found]
        if missing:
            patches = batch.image_grids.prod(-1).tolist()
            pixels = batch.pixel_values.split(patches)
            sent = torch.cat([pixels[n] for n in missing]).to(dtype)
            outputs = run_tower(tower, sent, batch.image_grids[missing])
            sizes = [patches[n] // tower.spatial_merge_size**2 for n in missing]
            for n, one in zip(missing, torch.stack(outputs).split(sizes, dim=1), strict=True):
                found[batch.image_keys[n]] = self._keep(batch.image_keys[n], one.clone())
        return list(torch.cat([found[key] for key in batch.image_keys], dim=1).unbind(0))

    def _keep(self, key: str, output: torch.Tensor) -> torch.Tensor:
        self._held[key] = output
        self._num_bytes += output.nbytes
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= self._held.popitem(last=False)[1].nbytes
        return output


def run_tower(tower: Any, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
    """Return embeddings and deepstack features of images, [tokens, H] each."""
    found = tower(pixels, grid_thw=grids)
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
