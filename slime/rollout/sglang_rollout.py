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
from slime.rollout.abort import end_all
from slime.rollout.base_types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.batch_filter import Verdicts, group_index
from slime.rollout.data_source import TracksRollouts
from slime.rollout.evaluation import evaluate
from slime.rollout.gc_thresholds import calm_garbage_collector
from slime.rollout.generate_call import Run, current_run, generate
from slime.rollout.group_task import run_group
from slime.rollout.samples import clone_group
from slime.rollout.sampling import rollout_sampling_params
from slime.utils import http

if TYPE_CHECKING:
    from slime.config.arguments import Args

__all__ = ["generate", "generate_rollout"]


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout, or one evaluation on every dataset of the arguments."""
    calm_garbage_collector()
    if evaluation:
        return http.run(evaluate(args, rollout_id))
    return http.run(_Collector(args, rollout_id, data_source).collect())


class _Collector:
    """Fills one batch. `undecided` holds each group that was taken and neither kept nor rejected."""

    def __init__(self, args: Args, rollout_id: int, data_source: DataSource) -> None:
        self.args = args
        self.source = data_source
        self.run = Run(
            seed_parts=(args.rollout_seed,) if args.deterministic else (),
            keep_partial=args.partial_rollout,
        )
        self.verdicts = Verdicts(args, rollout_id, self.run.calls)
        self.undecided: dict[asyncio.Task[Group], Group] = {}  # task -> the group as it was taken
        self.decided: list[Group] = []  # as they were taken
        self.finished: asyncio.Queue[asyncio.Task[Group]] = asyncio.Queue()

    async def collect(self) -> RolloutFnTrainOutput:
        current_run.set(self.run)
        if isinstance(self.source, TracksRollouts):
            self.source.begin(self.verdicts.rollout_id)
        try:
            while not self.verdicts.full:
                self._top_up()
                task = await self._next_finished()
                group = task.result()
                self.decided.append(self.undecided.pop(task))
                self.verdicts.decide(group)
        except BaseException:  # there will be no batch: all that was taken goes back as it was
            self.source.add_samples(sorted(self.decided, key=group_index))
            raise
        finally:
            await self._return_rest()
            self.verdicts.progress.finished = True
        return self.verdicts.output(self.source)

    def _top_up(self) -> None:
        """Enough groups under way to fill the batch if every one of them is kept."""
        batch = self.args.rollout_batch_size
        while len(self.verdicts.kept) + len(self.undecided) < batch:
            groups = self.source.get_samples(self.args.over_sampling_batch_size)
            if not groups:
                raise UserError(
                    f"the data source has no groups left for rollout {self.verdicts.rollout_id}"
                )
            for group in groups:
                params = rollout_sampling_params(self.args)
                count = self.verdicts.progress.count
                task = asyncio.create_task(
                    run_group(self.args, clone_group(group), params, on_sample=count)
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

    async def _return_rest(self) -> None:
        """End what is still under way and give it back: unfinished parts with `--partial-rollout`."""
        groups = await end_all(self.undecided, self.run)
        self.undecided.clear()
        if groups:
            self.source.add_samples(groups)
