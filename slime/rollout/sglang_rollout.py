"""The default rollout function: groups of samples from the engines, until a batch is full.

    data source ──groups──▶ one task per group: generate ─▶ reward      (run_group)
        ▲                          │ as each one ends
        │                          ▼
        │                   dynamic filter ──rejected──▶ counted by reason
        │                          │ kept
        │                          ▼
        └─unfinished, surplus── enough? ──▶ sort by group ─▶ sample filter ─▶ RolloutFnTrainOutput

Whatever happens, each group taken from the data source is kept, rejected, or goes back to it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

from slime.rollout import progress as progress_report
from slime.rollout.base_types import (
    AllSamplesProcess,
    DataSource,
    DynamicFilterOutput,
    DynamicSamplingFilter,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    RolloutSampleFilter,
)
from slime.rollout.data_source import TracksRollouts
from slime.rollout.engine_pool import current_pool
from slime.rollout.evaluation import evaluate
from slime.rollout.group_task import run_group
from slime.rollout.metrics import dropped_metrics, rollout_metrics
from slime.rollout.progress import Progress
from slime.rollout.samples import clone_group
from slime.rollout.sampling import rollout_sampling_params
from slime.rollout.turn import Run, current_run, generate
from slime.utils import http
from slime.utils.errors import UserError
from slime.utils.load_function import load_function
from slime.utils.types import Group, Sample, Status

if TYPE_CHECKING:
    from slime.utils.arguments import Args

__all__ = ["generate", "generate_rollout"]

logger = logging.getLogger(__name__)

_ABORT_EVERY_S = 1.0
_ABORT_DEADLINE_S = 60.0


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout, or one evaluation on every dataset of the arguments."""
    _freeze_loaded_objects()
    if evaluation:
        return http.run(evaluate(args, rollout_id))
    return http.run(_Collector(args, rollout_id, data_source).collect())


@cache
def _freeze_loaded_objects() -> None:
    """Replies are made of very many small lists; without this, Python's garbage collector walks through
    every module and tokenizer loaded so far again and again, which costs more than all the rest."""
    gc.collect()
    gc.freeze()


class _Collector:
    """Fills one batch. `undecided` holds each group that was taken and neither kept nor rejected."""

    def __init__(self, args: Args, rollout_id: int, data_source: DataSource) -> None:
        self.args = args
        self.rollout_id = rollout_id
        self.source = data_source
        self.run = Run(
            seed_parts=(args.rollout_seed,) if args.deterministic else (),
            keep_partial=args.partial_rollout,
        )
        self.undecided: dict[asyncio.Task[Group], Group] = {}  # task -> the group as it was taken
        self.finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()
        self.kept: list[Group] = []
        self.rejected: list[Group] = []
        self.dropped: Counter[str] = Counter()
        self.num_scored = 0
        self.first_failure: Sample | None = None
        self.progress = progress_report.start(
            Progress(rollout_id=rollout_id, target_groups=args.rollout_batch_size, finished=False)
        )

    async def collect(self) -> RolloutFnTrainOutput:
        current_run.set(self.run)
        if isinstance(self.source, TracksRollouts):
            self.source.begin(self.rollout_id)
        try:
            while len(self.kept) < self.args.rollout_batch_size:
                self._top_up()
                self._decide(await self._next_finished())
        finally:
            await self._return_rest()
            self.progress.finished = True
        return self._output()

    def _top_up(self) -> None:
        """Enough groups under way to fill the batch if every one of them is kept."""
        while len(self.kept) + len(self.undecided) < self.args.rollout_batch_size:
            groups = self.source.get_samples(self.args.over_sampling_batch_size)
            if not groups:
                raise UserError(f"the data source has no groups left for rollout {self.rollout_id}")
            for group in groups:
                params = rollout_sampling_params(self.args)
                task = asyncio.create_task(
                    run_group(self.args, clone_group(group), params, on_sample=self._count)
                )
                task.add_done_callback(self.finished.put_nowait)
                self.undecided[task] = group

    async def _next_finished(self) -> asyncio.Task[Group]:
        """The next task to decide on. In deterministic mode strictly in the order they were started,
        so that which groups make up the batch does not depend on timing."""
        if not self.args.deterministic:
            return await self.finished.get()
        task = next(iter(self.undecided))
        await asyncio.wait([task])
        return task

    def _decide(self, task: asyncio.Task[Group]) -> None:
        group = task.result()
        del self.undecided[task]
        self._watch_failures(group)
        verdict = self._filter(group)
        if verdict.keep:
            self.kept.append(group)
            self.progress.kept_groups += 1
        else:
            self.rejected.append(group)
            self.dropped[verdict.reason or "filter"] += 1
            self.progress.dropped_groups += 1
        progress_report.log_now_and_then(self.progress)
        self._warn_when_all_is_dropped()

    def _filter(self, group: Group) -> DynamicFilterOutput:
        path = self.args.dynamic_sampling_filter_path
        if path is None:
            return DynamicFilterOutput(keep=True)
        if all(sample.status == Status.FAILED for sample in group):
            return DynamicFilterOutput(keep=False, reason="failed")
        fn = load_function(
            path, flag="--dynamic-sampling-filter-path", protocol=DynamicSamplingFilter
        )
        verdict = fn(self.args, group)
        if isinstance(verdict, DynamicFilterOutput):
            return verdict
        return DynamicFilterOutput(keep=bool(verdict))

    def _watch_failures(self, group: Group) -> None:
        """Stop once a whole batch was generated and every sample of it failed."""
        failed = [sample for sample in group if sample.status == Status.FAILED]
        self.first_failure = self.first_failure or (failed[0] if failed else None)
        self.num_scored += len(group) - len(failed)
        decided = len(self.kept) + len(self.rejected) + 1
        if self.first_failure is None or self.num_scored or decided < self.args.rollout_batch_size:
            return
        metadata = self.first_failure.metadata
        raise UserError(
            f"every sample of rollout {self.rollout_id} failed, "
            f"the first one in {metadata['error_stage']}:\n{metadata['error_traceback']}"
        )

    def _warn_when_all_is_dropped(self) -> None:
        rounds, rest = divmod(len(self.rejected), 10 * self.args.rollout_batch_size)
        if rounds and not rest and not self.kept:
            logger.warning(
                "rollout %d: %s rejected all of %d groups so far (%s)",
                self.rollout_id, self.args.dynamic_sampling_filter_path, len(self.rejected),
                ", ".join(f"{reason}: {count}" for reason, count in self.dropped.items()),
            )  # fmt: skip

    def _count(self, sample: Sample) -> None:
        self.progress.generated_samples += 1
        self.progress.failed_samples += sample.status == Status.FAILED
        self.progress.response_tokens += sample.response_length

    async def _return_rest(self) -> None:
        """End what is still under way and give it back: unfinished parts with `--partial-rollout`."""
        if not self.undecided:
            return
        self.run.aborting = True
        if self.args.partial_rollout:
            await self._abort_until_done()
        else:
            await current_pool().abort_all()
        for task in self.undecided:
            task.cancel()
        await asyncio.gather(*self.undecided, return_exceptions=True)
        groups = [self._to_return(task, group) for task, group in self.undecided.items()]
        self.undecided.clear()
        self.source.add_samples(sorted(groups, key=_group_index))

    async def _abort_until_done(self) -> None:
        """Repeated: a request that was on its way when an engine aborted all it had is not among them."""
        for _ in range(round(_ABORT_DEADLINE_S / _ABORT_EVERY_S)):
            await current_pool().abort_all()
            _, running = await asyncio.wait(self.undecided, timeout=_ABORT_EVERY_S)
            if not running:
                return
        logger.warning("%d groups did not end when aborted; they start over", len(running))

    def _to_return(self, task: asyncio.Task[Group], taken: Group) -> Group:
        """The group with what it has so far where that may be continued, else as it was taken."""
        finished = not task.cancelled() and task.exception() is None
        if self.args.partial_rollout and finished:
            group = task.result()
            if len(group) == len(taken) and not any(s.status == Status.FAILED for s in group):
                return group
        return taken

    def _output(self) -> RolloutFnTrainOutput:
        args = self.args
        groups = sorted(self.kept, key=_group_index)
        if args.rollout_sample_filter_path:
            flag = "--rollout-sample-filter-path"
            load_function(args.rollout_sample_filter_path, flag=flag, protocol=RolloutSampleFilter)(
                args, groups
            )
        everything = sorted([*groups, *self.rejected], key=_group_index)
        if args.rollout_all_samples_process_path:
            flag = "--rollout-all-samples-process-path"
            load_function(
                args.rollout_all_samples_process_path, flag=flag, protocol=AllSamplesProcess
            )(args, everything, self.source)
        if isinstance(self.source, TracksRollouts):
            self.source.finish(self.rollout_id, [_group_index(group) for group in everything])
        self._report_failures(groups)
        metrics = {**rollout_metrics(args, groups), **dropped_metrics(self.dropped)}
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _report_failures(self, groups: list[Group]) -> None:
        failed = [s for group in groups for s in group if s.status == Status.FAILED]
        if failed:
            logger.warning(
                "rollout %d: %d samples failed and are not trained on; the first one in %s: %s",
                self.rollout_id, len(failed), failed[0].metadata["error_stage"],
                failed[0].metadata["error"],
            )  # fmt: skip


def _group_index(group: Group) -> int:
    return group[0].group_index or 0
