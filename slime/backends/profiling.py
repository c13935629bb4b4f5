"""`--profile-target`: record parts of the training with torch's profiler.

The second rollout that a process trains on is recorded (or the only one): the first has one-time
costs such as compilation. Traces are `profile/<target>_rollout<id>_rank<rank>.json.gz` in the run's
folder; open them at https://ui.perfetto.dev.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Profiler:
    """Record each target into a trace file. A region nested in a target that is being recorded, as
    all are in `train_overall`, becomes a named range in its trace and gets no file of its own."""

    def __init__(
        self, targets: Sequence[str] | None, run_dir: str, rank: int, num_rollout: int
    ) -> None:
        self._targets = targets or []
        self._folder = Path(run_dir) / "profile"
        self._rank, self._num_rollout = rank, num_rollout
        self._first: int | None = None
        self._active = False

    @contextmanager
    def region(self, name: str, rollout_id: int) -> Iterator[None]:
        if not self._targets:
            yield
            return
        self._first = rollout_id if self._first is None else self._first
        wanted = name in self._targets and rollout_id == min(self._first + 1, self._num_rollout - 1)
        if not wanted or self._active:
            with record_function(name):
                yield
            return
        self._active = True
        try:
            with profile(activities=_activities()) as recorded, record_function(name):
                yield
        finally:
            self._active = False
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{name}_rollout{rollout_id}_rank{self._rank}.json.gz"
        recorded.export_chrome_trace(str(file))


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]
