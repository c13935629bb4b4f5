"""Fill one training batch: keep or reject finished groups, count the reasons, apply the user's filters."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from slime.core.errors import UserError
from slime.core.types import Group, Sample, Status
from slime.rollout.base_types import (
    AllSamplesProcess,
    DataSource,
    DynamicFilterOutput,
    DynamicSamplingFilter,
    RolloutFnTrainOutput,
    RolloutSampleFilter,
)
from slime.rollout.context import RolloutContext
from slime.rollout.data_source import TracksRollouts
from slime.rollout.metrics import dropped_metrics, rollout_metrics
from slime.rollout.progress import Progress
from slime.rollout.staleness import limit_staleness
from slime.utils.load_function import load_function

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

# A filter that rejects this many batches, and at least this many groups, in a row rejects everything.
_REJECTED_BATCHES, _REJECTED_GROUPS = 20, 256


class BatchFilter:
    """Takes finished groups one at a time until the batch is `full`, then returns the `output`."""

    def __init__(self, args: Args, rollout_id: int, context: RolloutContext) -> None:
        assert context.generation is not None
        self.args = args
        self.context = context
        self.rollout_id = rollout_id
        self.kept: list[Group] = []
        self.rejected: list[Group] = []
        self._dropped: Counter[str] = Counter()
        self._rejected_in_a_row = 0
        self._num_scored = 0
        self._first_failure: Sample | None = None
        self.progress = context.progress.start(
            Progress(
                rollout_id=rollout_id,
                target_groups=args.rollout_batch_size,
                finished=False,
                hook_calls=context.generation.hook_calls,
            )
        )

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.args.rollout_batch_size

    def add(self, group: Group) -> None:
        """Keep or reject the group."""
        self._raise_if_all_failed(group)
        result = self._apply_dynamic_filter(group)
        if result.keep:
            self.kept.append(group)
            self.progress.kept_groups += 1
            self._rejected_in_a_row = 0
        else:
            self.rejected.append(group)
            self._dropped[result.reason or "filter"] += 1
            self.progress.dropped_groups += 1
            self._rejected_in_a_row += 1
        self.context.progress.log(self.progress)
        self._raise_if_all_rejected()

    def output(self, source: DataSource) -> RolloutFnTrainOutput:
        """Return the batch in group order and mark its groups as finished in the data source."""
        args = self.args
        groups = sorted(self.kept, key=group_index)
        stale = limit_staleness(args, self.rollout_id, groups, self.context.clock)
        if args.rollout_sample_filter_path:
            flag = "--rollout-sample-filter-path"
            load_function(args.rollout_sample_filter_path, flag=flag, protocol=RolloutSampleFilter)(
                args, groups
            )
        everything = sorted([*groups, *self.rejected], key=group_index)
        if args.rollout_all_samples_process_path:
            flag = "--rollout-all-samples-process-path"
            load_function(
                args.rollout_all_samples_process_path, flag=flag, protocol=AllSamplesProcess
            )(args, everything, source)
        if isinstance(source, TracksRollouts):
            source.finish(self.rollout_id, [group_index(group) for group in everything])
        self._warn_of_failures(groups)
        metrics = {**rollout_metrics(args, groups), **stale, **dropped_metrics(self._dropped)}
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _apply_dynamic_filter(self, group: Group) -> DynamicFilterOutput:
        path = self.args.dynamic_sampling_filter_path
        if path is None:
            return DynamicFilterOutput(keep=True)
        if all(sample.status == Status.FAILED for sample in group):
            return DynamicFilterOutput(keep=False, reason="failed")
        fn = load_function(
            path, flag="--dynamic-sampling-filter-path", protocol=DynamicSamplingFilter
        )
        return _as_filter_output(fn(self.args, group), path)

    def _raise_if_all_failed(self, group: Group) -> None:
        """Raise once a whole batch was generated and every sample of it failed."""
        failed = [sample for sample in group if sample.status == Status.FAILED]
        self._first_failure = self._first_failure or (failed[0] if failed else None)
        self._num_scored += len(group) - len(failed)
        num_groups = len(self.kept) + len(self.rejected) + 1
        if (
            self._first_failure is None
            or self._num_scored
            or num_groups < self.args.rollout_batch_size
        ):
            return
        metadata = self._first_failure.metadata
        raise UserError(
            f"every sample of rollout {self.rollout_id} failed, "
            f"the first one in {metadata['error_stage']}:\n{metadata['error_traceback']}"
        )

    def _raise_if_all_rejected(self) -> None:
        batches = _REJECTED_BATCHES * self.args.rollout_batch_size
        if self._rejected_in_a_row < max(batches, _REJECTED_GROUPS):
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self._dropped.items())
        raise UserError(
            f"rollout {self.rollout_id}: --dynamic-sampling-filter-path "
            f"{self.args.dynamic_sampling_filter_path} rejected {self._rejected_in_a_row} groups in a "
            f"row ({reasons}) and {len(self.kept)} of {self.args.rollout_batch_size} are kept: the "
            "prompts are too easy or too hard for the model. Choose other --prompt-data, more "
            "--n-samples-per-prompt, or another filter"
        )

    def _warn_of_failures(self, groups: list[Group]) -> None:
        failed = [s for group in groups for s in group if s.status == Status.FAILED]
        if failed:
            logger.warning(
                "rollout %d: %d samples failed and are not trained on; the first one in %s: %s",
                self.rollout_id, len(failed), failed[0].metadata["error_stage"],
                failed[0].metadata["error"],
            )  # fmt: skip


def _as_filter_output(result: Any, path: str) -> DynamicFilterOutput:
    """Refuse None and containers: a missing `return` would silently reject, a tuple keep, every group."""
    if isinstance(result, DynamicFilterOutput):
        return result
    if result is None or isinstance(result, (str, bytes, tuple, list, dict, set)):
        raise UserError(
            f"--dynamic-sampling-filter-path {path} returned {result!r}; expected a bool or "
            "DynamicFilterOutput(keep=..., reason=...)"
        )
    return DynamicFilterOutput(keep=bool(result))


def group_index(group: Group) -> int:
    return group[0].group_index or 0
