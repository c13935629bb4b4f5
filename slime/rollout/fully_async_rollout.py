"""Generation that never stops (`--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout`).

    data source ──▶ Stream: groups under way ──▶ groups that wait     (all the time, also during training)
         ▲                                            │
         │ too old as a whole: anew                   ▼
         └──────────────────────────── generate_rollout: filter ──▶ the batch, once it is full

Weights change while requests are under way: each goes on with the new ones, or, if its engine aborted
it, continues behind the tokens it has; every token carries the version it came from. A group is begun
only if, behind all that is under way or waits, it would still be trained on in time for
`--max-weight-staleness`. Responses may take longer than that: tokens that are too old by then are taken
out of the loss, and a group with a response of nothing else is generated anew.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Group, Sample
from slime.rollout.abort import end_all
from slime.rollout.base_types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.batch_filter import Verdicts, group_index
from slime.rollout.data_source import TracksRollouts
from slime.rollout.evaluation import evaluate
from slime.rollout.gc_thresholds import calm_garbage_collector
from slime.rollout.generate_call import Run, current_run
from slime.rollout.group_task import run_group
from slime.rollout.samples import clone_group, restart
from slime.rollout.sampling import rollout_sampling_params
from slime.rollout.staleness import current_clock, is_too_old
from slime.utils import http

if TYPE_CHECKING:
    from slime.config.arguments import Args

_STALENESS = 1  # without --max-weight-staleness: updates that generation may run ahead
_LOOK_AGAIN_S = 0.2


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next full batch; an evaluation runs beside the generation."""
    calm_garbage_collector()
    if evaluation:
        return http.run(evaluate(args, rollout_id))
    return http.run(_stream_of(args, data_source).collect(rollout_id))


# A run whose rollout function says so updates weights while requests are under way.
generate_rollout.never_stops = True  # type: ignore[attr-defined]

_stream: Stream | None = None


def _stream_of(args: Args, data_source: DataSource) -> Stream:
    """The process's one stream; another data source is another run."""
    global _stream
    if _stream is None or _stream.source is not data_source:
        _stream = Stream(args, data_source)
    return _stream


class Stream:
    """Groups under way and groups that wait; lives on the event loop from rollout to rollout."""

    def __init__(self, args: Args, data_source: DataSource) -> None:
        self.args = args
        self.source = data_source
        self.run = Run(keep_partial=True)
        self.running: dict[asyncio.Task[Group], Group] = {}  # task -> the group as it was taken
        self.waiting: dict[asyncio.Task[Group], Group] = {}  # finished, in that order
        self.verdicts: Verdicts | None = None  # of the batch being filled
        self.rollout_id = 0  # of that batch, or of the next one
        self._news = asyncio.Event()

    async def collect(self, rollout_id: int) -> RolloutFnTrainOutput:
        if isinstance(self.source, TracksRollouts):
            self.source.begin(rollout_id)
        self.rollout_id = rollout_id
        verdicts = self.verdicts = Verdicts(self.args, rollout_id, self.run.calls)
        try:
            num_stale = await self._fill(verdicts)
            output = verdicts.output(self.source)
            self.rollout_id += 1
        finally:
            verdicts.progress.finished = True
            self.verdicts = None
        if self.rollout_id >= self.args.num_rollout:
            await self.stop()
        self._top_up()
        output.metrics["rollout/stale_groups"] = float(num_stale)
        return output

    async def _fill(self, verdicts: Verdicts) -> int:
        """Decide on finished groups until the batch is full; how many started anew for their age."""
        num_stale, decided = 0, []
        try:
            while not verdicts.full:
                task = await self._next_finished()
                taken = self.waiting.pop(task)
                decided.append(taken)
                if is_too_old(self.args, verdicts.rollout_id, task.result()):
                    self.source.add_samples([[restart(sample) for sample in decided.pop()]])
                    num_stale += 1
                else:
                    verdicts.decide(task.result())
        except BaseException:  # there will be no batch: what was decided goes back as it was
            self.source.add_samples(sorted(decided, key=group_index))
            raise
        return num_stale

    async def stop(self) -> None:
        """Give everything back to the data source, unfinished responses as far as they came."""
        everything = {**self.waiting, **self.running}
        self.waiting, self.running = {}, {}
        self.source.add_samples(await end_all(everything, self.run))
        self.run = Run(keep_partial=True)

    async def _next_finished(self) -> asyncio.Task[Group]:
        while not self.waiting:
            self._top_up()
            self._news.clear()
            with suppress(asyncio.TimeoutError):  # new weights allow new groups, and tell nobody
                await asyncio.wait_for(self._news.wait(), _LOOK_AGAIN_S)
        return next(iter(self.waiting))

    def _top_up(self) -> None:
        """As many groups under way as `--over-sampling-batch-size` says, if they are used in time."""
        count = 0
        while len(self.running) + count < self.args.over_sampling_batch_size and self._in_time(
            count
        ):
            count += 1
        groups = self.source.get_samples(count) if count else []
        if count and not groups and not self.running and not self.waiting:
            raise UserError("the data source has no groups left")
        for group in groups:
            task = asyncio.get_running_loop().create_task(self._run(clone_group(group)))
            self.running[task] = group
            task.add_done_callback(self._finished)

    def _in_time(self, more: int) -> bool:
        """Whether a group begun now, behind `more` others, will be trained on before it is too old."""
        kept = len(self.verdicts.kept) if self.verdicts is not None else 0
        ahead = len(self.running) + len(self.waiting) + kept + more
        trained_in = self.rollout_id + ahead // self.args.rollout_batch_size
        if trained_in >= self.args.num_rollout:
            return False
        limit = self.args.max_weight_staleness
        limit = _STALENESS if limit is None else limit
        clock = current_clock(self.rollout_id)
        return clock.trained_by(trained_in) - clock.version <= limit

    async def _run(self, group: Group) -> Group:
        current_run.set(self.run)
        params = rollout_sampling_params(self.args)
        return await run_group(self.args, group, params, on_sample=self._count)

    def _finished(self, task: asyncio.Task[Group]) -> None:
        taken = self.running.pop(task, None)
        if taken is not None:  # else `stop` ended it
            self.waiting[task] = taken
            self._news.set()
            self._top_up()

    def _count(self, sample: Sample) -> None:
        if self.verdicts is not None:
            self.verdicts.progress.count(sample)
