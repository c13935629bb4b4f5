"""Reduce the training metrics of all ranks and steps of one rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slime.algorithms.correction import mismatch_metrics
from slime.backends.step import StepResult
from slime.core.train_batch import add_up, prefixed, reduce_metrics
from slime.core.types import MetricSum, ParallelInfo, RolloutBatch, TrainReport

if TYPE_CHECKING:
    from slime.config.arguments import Args


class Reporter:
    """Metrics of one model; all of its ranks call `report` together."""

    def __init__(self, args: Args, role: str, parallel: ParallelInfo) -> None:
        self._args, self._role, self._parallel = args, role, parallel

    def report(
        self, batch: RolloutBatch, results: list[StepResult], times: dict[str, float]
    ) -> TrainReport:
        """Return metrics reduced over all steps and ranks; `times` are those of this rank."""
        gap_sums, gap_maxima = self._mismatch(batch, results)
        sums = add_up([*(result.metrics for result in results), gap_sums])
        means = reduce_metrics(sums, gap_maxima, gather=self._gather)
        if self._role == "critic":
            means = {f"critic_{name}": value for name, value in means.items()}
        metrics = {**prefixed("train", means), **times}
        if self._role == "actor":
            tokens = sum(self._gather(sum(batch.total_lens))) / self._parallel.cp_size
            metrics["perf/train_tokens"] = float(tokens)
        return TrainReport(metrics=metrics)

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
        speaks = here.tp_rank == 0 and here.pp_rank == here.pp_size - 1
        everyone: list[Any] = [(speaks, value)] * here.world_size
        if here.world_size > 1:
            dist.all_gather_object(everyone, (speaks, value))
        return [said for counts, said in everyone if counts]
