"""What a trainer rank reports of one rollout: metrics reduced over steps and ranks, and profiles.

`--profile-target` records parts of the training with torch's profiler: the second rollout that a
process trains on (or the only one), since the first has one-time costs such as compilation. Traces
are `profile/<target>_rollout<id>_rank<rank>.json.gz` in the run's folder; open them at
https://ui.perfetto.dev.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from slime.algorithms.policy_loss import mismatch_metrics
from slime.backends.backend import StepResult
from slime.core.batches import add_up, prefixed, reduce_metrics
from slime.core.dp_schedule import trained_rows
from slime.core.types import (
    Activity,
    MetricSum,
    ParallelInfo,
    RolloutBatch,
    TrainedTokens,
    TrainReport,
)

if TYPE_CHECKING:
    from slime.config.arguments import Args

_LOGGED_COLUMNS = ("advantages", "ref_log_probs", "teacher_log_probs", "values")


class Reporter:
    """Metrics of one model; all of its ranks call `report` together."""

    def __init__(self, args: Args, role: str, parallel: ParallelInfo) -> None:
        self._args, self._role, self._parallel = args, role, parallel

    def report(
        self,
        batch: RolloutBatch,
        results: list[StepResult],
        times: dict[str, float],
        activity: Activity,
    ) -> TrainReport:
        """Return metrics reduced over all steps and ranks; `times` and `activity` are those of this rank."""
        gap_sums, gap_maxima = self._mismatch(batch, results)
        sums = add_up([*(result.metrics for result in results), gap_sums])
        means = reduce_metrics(sums, gap_maxima, gather=self._gather)
        if self._role == "critic":
            means = {f"critic_{name}": value for name, value in means.items()}
        metrics = {**prefixed("train", means), **times}
        if self._role == "actor":
            here = sum(len(batch.tokens[row]) for row in trained_rows(batch.schedule, len(batch)))
            metrics["perf/train_tokens"] = sum(self._gather(here)) / self._parallel.cp_size
        tokens = self._trained_tokens(batch, results)
        return TrainReport(metrics=metrics, tokens=tokens, activity=activity)

    def _trained_tokens(
        self, batch: RolloutBatch, results: list[StepResult]
    ) -> list[TrainedTokens]:
        """Return the trainer's columns of logged rows, from one of the ranks that hold these rows."""
        here = self._parallel
        alone = here.tp_rank == here.cp_rank == 0 and here.pp_rank == here.pp_size - 1
        if self._role != "actor" or batch.logged is None or not alone:
            return []
        computed = {row: values for result in results for row, values in result.log_probs.items()}
        if batch.old_log_probs is not None:
            computed = dict(enumerate(batch.old_log_probs))
        found = []
        for row in trained_rows(batch.schedule, len(batch)):
            if not batch.logged[row]:
                continue
            optional = {name: getattr(batch, name) for name in _LOGGED_COLUMNS}
            columns = {name: column[row] for name, column in optional.items() if column is not None}
            if row in computed:
                columns["trainer_log_probs"] = computed[row]
            if columns:
                index = int(batch.sample_indices[row])
                prompt_len = len(batch.tokens[row]) - int(batch.response_lens[row])
                found.append(
                    TrainedTokens(sample_index=index, prompt_len=prompt_len, columns=columns)
                )
        return found

    def _mismatch(
        self, batch: RolloutBatch, results: list[StepResult]
    ) -> tuple[dict[str, MetricSum], dict[str, float]]:
        """Return `mismatch_metrics` before the first update; later steps also differ by updates."""
        if batch.rollout_log_probs is None or self._args.loss_type != "policy_loss":
            return {}, {}
        if self._role != "actor" or not (results or batch.old_log_probs):
            return {}, {}
        breakdown = self._args.get_mismatch_metrics
        if batch.old_log_probs is not None:
            return mismatch_metrics(batch, breakdown=breakdown)
        rows = sorted(results[0].log_probs)
        seen = batch.select(rows)
        seen.old_log_probs = [results[0].log_probs[row] for row in rows]
        return mismatch_metrics(seen, breakdown=breakdown)

    def _gather(self, value: object) -> list[Any]:
        """Gather the values of ranks with a loss: TP rank 0 of each last pipeline stage."""
        here = self._parallel
        has_loss = here.tp_rank == 0 and here.pp_rank == here.pp_size - 1
        everyone: list[Any] = [(has_loss, value)] * here.world_size
        if here.world_size > 1:
            dist.all_gather_object(everyone, (has_loss, value))
        return [each for counts, each in everyone if counts]


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
