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
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Group
from slime.rollout.base_types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.batch_filter import BatchFilter, group_index
from slime.rollout.context import GenerationState, RolloutContext
from slime.rollout.data_source import TracksRollouts
from slime.rollout.evaluation import evaluate
from slime.rollout.generate_call import generate
from slime.rollout.group_task import abort_groups, run_group
from slime.rollout.samples import clone_group
from slime.rollout.sampling import rollout_sampling_params
from slime.utils import http
from slime.utils.gc_tuning import raise_gc_thresholds

if TYPE_CHECKING:
    from slime.config.arguments import Args

__all__ = ["generate", "generate_rollout"]


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate one batch, or evaluate on every evaluation dataset."""
    raise_gc_thresholds()
    if evaluation:
        return http.run(evaluate(args, rollout_id))
    return http.run(_BatchCollector(args, rollout_id, data_source).collect())


class _BatchCollector:
    """Fills one batch. `running` holds each group that was taken and neither kept nor rejected so far."""

    def __init__(self, args: Args, rollout_id: int, data_source: DataSource) -> None:
        self.args = args
        self.source = data_source
        self.context = RolloutContext.current().for_generation(
            GenerationState(
                seed_parts=(args.rollout_seed,) if args.deterministic else (),
                keep_partial=args.partial_rollout,
            )
        )
        self.batch = BatchFilter(args, rollout_id, self.context)
        self.running: dict[asyncio.Task[Group], Group] = {}  # task -> the group as it was taken
        self.decided: list[Group] = []  # kept and rejected groups, as they were taken
        self.finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()

    async def collect(self) -> RolloutFnTrainOutput:
        with self.context.active():
            return await self._collect()

    async def _collect(self) -> RolloutFnTrainOutput:
        if isinstance(self.source, TracksRollouts):
            self.source.begin(self.batch.rollout_id)
        try:
            while not self.batch.full:
                self._start_groups()
                task = await self._next_finished()
                group = task.result()
                self.decided.append(self.running.pop(task))
                self.batch.add(group)
        except BaseException:  # there will be no batch: every group goes back as it was taken
            self.source.add_samples(sorted(self.decided, key=group_index))
            raise
        finally:
            await self._return_rest()
            self.batch.progress.finished = True
        return self.batch.output(self.source)

    def _start_groups(self) -> None:
        """Start groups until the batch would be full if every one of them were kept.

        Each time `--over-sampling-batch-size` groups are taken from the data source at once.
        """
        while len(self.batch.kept) + len(self.running) < self.args.rollout_batch_size:
            groups = self.source.get_samples(self.args.over_sampling_batch_size)
            if not groups:
                raise UserError(
                    f"the data source has no groups left for rollout {self.batch.rollout_id}"
                )
            for group in groups:
                params = rollout_sampling_params(self.args)
                count = self.batch.progress.count
                task = asyncio.create_task(
                    run_group(self.args, clone_group(group), params, on_sample=count)
                )
                task.add_done_callback(self.finished.put_nowait)
                self.running[task] = group

    async def _next_finished(self) -> asyncio.Task[Group]:
        """Return the next finished task; in deterministic mode in the order in which they were started,
        so that the groups of a batch do not depend on timing."""
        if not self.args.deterministic:
            return await self.finished.get()
        task = next(iter(self.running))
        await asyncio.wait([task])
        return task

    async def _return_rest(self) -> None:
        """Abort what is still running and return it to the data source, partial with `--partial-rollout`."""
        groups = await abort_groups(self.running, self.context)
        self.running.clear()
        if groups:
            self.source.add_samples(groups)
