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
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    RolloutSampleFilter,
)
from slime.rollout.context import GenerationState, RolloutContext
from slime.rollout.data_source import TracksRollouts
from slime.rollout.engine_pool import EnginePool
from slime.rollout.evaluation import evaluate
from slime.rollout.group_task import abort_groups, run_group
from slime.rollout.metrics import Progress, dropped_metrics, rollout_metrics
from slime.rollout.samples import clone_group, group_index, limit_staleness
from slime.rollout.sampling import generate, rollout_sampling_params
from slime.utils import http
from slime.utils.gc_tuning import raise_gc_thresholds
from slime.utils.load_function import load_hook

if TYPE_CHECKING:
    from slime.config.arguments import Args

__all__ = ["BatchFilter", "generate", "generate_rollout", "get_model_pool", "get_model_url"]

logger = logging.getLogger(__name__)

# A filter that rejects this many batches, and at least this many groups, in a row rejects everything.
_REJECTED_BATCHES, _REJECTED_GROUPS = 20, 256


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate one batch, or evaluate on every evaluation dataset."""
    raise_gc_thresholds()
    if evaluation:
        return http.run(evaluate(args, rollout_id))
    return http.run(_BatchCollector(args, rollout_id, data_source).collect())


def get_model_url(args: Args, model_name: str, endpoint: str = "/generate") -> str:
    """Return an address of a model of --sglang-config, for hooks that send requests themselves.

    This is the router's address or, without a router, the next engine's at each call. `get_model_pool`
    also retries on other engines.
    """
    return RolloutContext.current().model(model_name).next_url() + endpoint


def get_model_pool(model_name: str) -> EnginePool:
    """Return the engines of a model of --sglang-config: `await get_model_pool("judge").generate(payload)`."""
    return RolloutContext.current().model(model_name)


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
                if not self.running:
                    self.batch.use_spares()
                    continue
                task = await self._next_finished()
                group = task.result()
                self.decided.append(self.running.pop(task))
                self.batch.add(group)
        except BaseException:  # there will be no batch: finished groups go back as they were taken
            self.source.add_samples(sorted(self.decided, key=group_index))
            raise
        finally:
            await self._return_rest()
            self.batch.progress.finished = True
        return self.batch.output(self.source)

    def _start_groups(self) -> None:
        """Start groups until the batch would be full if every one of them were kept or spare.

        Each time `--over-sampling-batch-size` groups are taken from the data source at once.
        """
        while len(self.running) + self.batch.num_candidates < self.args.rollout_batch_size:
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


class BatchFilter:
    """Takes finished groups one at a time until the batch is `full`, then returns the `output`."""

    def __init__(self, args: Args, rollout_id: int, context: RolloutContext) -> None:
        assert context.generation is not None
        self.args = args
        self.context = context
        self.rollout_id = rollout_id
        self.kept: list[Group] = []
        self.rejected: list[Group] = []
        # Rejected with `keep_when_insufficient`, by reason; used if too few groups are kept.
        self.spares: list[tuple[Group, str]] = []
        self._dropped: Counter[str] = Counter()
        self._rejected_in_a_row = 0
        self._num_scored = 0
        self._first_failure: Sample | None = None
        self._reward_clock = context.generation.reward_clock
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

    @property
    def num_candidates(self) -> int:
        """Return how many groups the batch would have with its spares."""
        return len(self.kept) + len(self.spares)

    def use_spares(self) -> None:
        """Fill the batch with spare groups, the oldest first."""
        while self.spares and not self.full:
            self._keep(self.spares.pop(0)[0])

    def add(self, group: Group) -> None:
        """Keep or reject the group."""
        self._raise_if_all_failed(group)
        result = self._apply_dynamic_filter(group)
        reason = result.reason or "filter"
        if result.keep:
            self._keep(group)
        elif result.keep_when_insufficient:
            self.spares.append((group, reason))
        else:
            self._reject(group, reason)
        self.context.progress.log(self.progress)
        self._raise_if_all_rejected()

    def _keep(self, group: Group) -> None:
        self.kept.append(group)
        self.progress.kept_groups += 1
        self._rejected_in_a_row = 0

    def _reject(self, group: Group, reason: str) -> None:
        self.rejected.append(group)
        self._dropped[reason] += 1
        self.progress.dropped_groups += 1
        self._rejected_in_a_row += 1

    def output(self, source: DataSource) -> RolloutFnTrainOutput:
        """Return the batch in group order and mark its groups as finished in the data source."""
        args = self.args
        for group, reason in self.spares:
            self._reject(group, reason)
        groups = sorted(self.kept, key=group_index)
        # Before stale tokens are masked, because they were generated too.
        metrics = rollout_metrics(args, groups)
        metrics |= limit_staleness(args, self.rollout_id, groups, self.context.clock)
        if args.rollout_sample_filter_path:
            flag = "--rollout-sample-filter-path"
            load_hook(args.rollout_sample_filter_path, flag=flag, protocol=RolloutSampleFilter)(
                args, groups
            )
        everything = sorted([*groups, *self.rejected], key=group_index)
        if args.rollout_all_samples_process_path:
            flag = "--rollout-all-samples-process-path"
            load_hook(args.rollout_all_samples_process_path, flag=flag, protocol=AllSamplesProcess)(
                args, everything, source
            )
        if isinstance(source, TracksRollouts):
            source.finish(self.rollout_id, [group_index(group) for group in everything])
        self._warn_of_failures(groups)
        metrics |= dropped_metrics(self._dropped)
        metrics["perf/reward_time"] = self._reward_clock.take()
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _apply_dynamic_filter(self, group: Group) -> DynamicFilterOutput:
        path = self.args.dynamic_sampling_filter_path
        if path is None:
            return DynamicFilterOutput(keep=True)
        if all(sample.status == Status.FAILED for sample in group):
            return DynamicFilterOutput(keep=False, reason="failed")
        fn = load_hook(path, flag="--dynamic-sampling-filter-path", protocol=DynamicSamplingFilter)
        return _as_filter_output(fn(self.args, group), path)

    def _raise_if_all_failed(self, group: Group) -> None:
        """Raise once a whole batch was generated and every sample of it failed."""
        failed = [sample for sample in group if sample.status == Status.FAILED]
        self._first_failure = self._first_failure or (failed[0] if failed else None)
        self._num_scored += len(group) - len(failed)
        num_groups = self.num_candidates + len(self.rejected) + 1
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


def __getattr__(name: str) -> Any:
    if name in ("GenerateState", "generate_and_rm", "generate_and_rm_group"):
        from slime.compat import rollout_calls  # for hooks of earlier versions

        return getattr(rollout_calls, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
