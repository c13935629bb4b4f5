"""Generation that never stops (`--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout`).

    data source ──▶ GroupStream: running groups ──▶ finished groups     (all the time, also during training)
         ▲                                              │
         │ too stale as a whole: restart                ▼
         └──────────────────────────── generate_rollout: filter ──▶ the batch, once it is full

Weights change while requests are running: a request continues with the new weights, or, if its engine
aborted it, is continued after the tokens it has. Every token carries the version that generated it. A group
is started only if, after everything that is running or finished, it would still be trained on within
`--max-weight-staleness`. A response may take longer than that: tokens that are too stale by then are masked
out of the loss, and a group with a response of only such tokens is restarted.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from slime.config.flags.rollout import DEFAULT_STALENESS
from slime.core.errors import UserError
from slime.core.types import Group, Sample
from slime.rollout.base_types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.context import GenerationState, RolloutContext
from slime.rollout.data_source import TracksRollouts
from slime.rollout.evaluation import evaluate
from slime.rollout.group_task import abort_groups, run_group
from slime.rollout.samples import clone_group, group_index, is_too_stale, restart
from slime.rollout.sampling import rollout_sampling_params
from slime.rollout.sglang_rollout import BatchFilter
from slime.utils import http
from slime.utils.gc_tuning import raise_gc_thresholds

if TYPE_CHECKING:
    from slime.config.arguments import Args

_POLL_S = 0.2


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the next full batch; an evaluation runs beside the generation."""
    raise_gc_thresholds()
    if evaluation:
        return http.run(evaluate(args, rollout_id))
    return http.run(stream_of(args, data_source).collect(rollout_id))


# A run whose rollout function has this attribute updates weights while requests are running.
generate_rollout.never_stops = True  # type: ignore[attr-defined]


generate_rollout_fully_async = generate_rollout  # its name in earlier versions


def stream_of(args: Args, data_source: DataSource) -> GroupStream:
    """Return the stream of this run and data source, created on first use."""
    return RolloutContext.current().shared(
        (GroupStream, id(data_source)), lambda: GroupStream(args, data_source)
    )


class GroupStream:
    """Running and finished groups; lives on the event loop from rollout to rollout."""

    def __init__(self, args: Args, data_source: DataSource) -> None:
        self.args = args
        self.source = data_source
        self.context = _new_generation(RolloutContext.current())
        self.running: dict[asyncio.Task[Group], Group] = {}  # task -> the group as it was taken
        self.finished: dict[asyncio.Task[Group], Group] = {}  # in the order in which they finished
        self.batch: BatchFilter | None = None  # the batch being filled
        self.rollout_id = 0  # of that batch, or of the next one
        self._finished_event = asyncio.Event()

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        if isinstance(self.source, TracksRollouts):
            self.source.begin(rollout_id)
        self.rollout_id = rollout_id
        batch = self.batch = BatchFilter(self.args, rollout_id, self.context)
        try:
            num_stale = await self._fill(batch)
            output = batch.output(self.source)
            self.rollout_id += 1
        finally:
            batch.progress.finished = True
            self.batch = None
        if self.rollout_id >= self.args.num_rollout:
            await self.stop()
        self._start_groups()
        output.metrics["rollout/stale_groups"] = float(num_stale)
        return output

    async def _fill(self, batch: BatchFilter) -> int:
        """Add finished groups until the batch is full; return how many were restarted as too stale."""
        num_stale, decided = 0, []
        try:
            while not batch.full:
                task = await self._next_finished()
                taken = self.finished.pop(task)
                decided.append(taken)
                if is_too_stale(self.args, batch.rollout_id, task.result(), self.context.clock):
                    self.source.add_samples([[restart(sample) for sample in decided.pop()]])
                    num_stale += 1
                else:
                    batch.add(task.result())
                    self._use_spares_if_due(batch)
        except BaseException:  # there will be no batch: its groups go back as they were taken
            self.source.add_samples(sorted(decided, key=group_index))
            raise
        return num_stale

    def _use_spares_if_due(self, batch: BatchFilter) -> None:
        """Use spare groups once --over-sampling-batch-size groups have been kept, spared or rejected."""
        args = self.args
        ended = batch.num_candidates + len(batch.rejected)
        if (
            ended >= args.over_sampling_batch_size
            and batch.num_candidates >= args.rollout_batch_size
        ):
            batch.use_spares()

    async def stop(self) -> None:
        """Return everything to the data source, unfinished responses with the tokens they have."""
        everything = {**self.finished, **self.running}
        self.finished, self.running = {}, {}
        self.source.add_samples(await abort_groups(everything, self.context))
        self.context = _new_generation(self.context)

    async def _next_finished(self) -> asyncio.Task[Group]:
        while not self.finished:
            self._start_groups()
            self._finished_event.clear()
            # A weight update may allow new groups, but sets no event: poll.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._finished_event.wait(), _POLL_S)
        return next(iter(self.finished))

    def _start_groups(self) -> None:
        """Keep `--over-sampling-batch-size` groups running, as long as they would not become too stale."""
        count = 0
        limit = self.args.over_sampling_batch_size
        while len(self.running) + count < limit and self._trained_in_time(count):
            count += 1
        groups = self.source.get_samples(count) if count else []
        if count and not groups and not self.running and not self.finished:
            raise UserError("the data source has no groups left")
        for group in groups:
            task = asyncio.get_running_loop().create_task(self._run(clone_group(group)))
            self.running[task] = group
            task.add_done_callback(self._on_finished)

    def _trained_in_time(self, more: int) -> bool:
        """Return whether a group started now, after `more` others, is trained on before it is too stale."""
        kept = len(self.batch.kept) if self.batch is not None else 0
        ahead = len(self.running) + len(self.finished) + kept + more
        trained_in = self.rollout_id + ahead // self.args.rollout_batch_size
        if trained_in >= self.args.num_rollout:
            return False
        limit = self.args.max_weight_staleness
        limit = DEFAULT_STALENESS if limit is None else limit
        clock = self.context.clock
        return clock.updates_until(trained_in, current_rollout_id=self.rollout_id) <= limit

    async def _run(self, group: Group) -> Group:
        with self.context.active():
            params = rollout_sampling_params(self.args)
            return await run_group(self.args, group, params, on_sample=self._count)

    def _on_finished(self, task: asyncio.Task[Group]) -> None:
        taken = self.running.pop(task, None)
        if taken is not None:  # None: `stop` aborted it
            self.finished[task] = taken
            self._finished_event.set()
            self._start_groups()

    def _count(self, sample: Sample) -> None:
        if self.batch is not None:
            self.batch.progress.count(sample)


def _new_generation(context: RolloutContext) -> RolloutContext:
    return context.for_generation(GenerationState(keep_partial=True))
