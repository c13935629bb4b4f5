"""What rollout and generate functions of earlier versions call: GenerateState, generate_and_rm, ..."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.compat.loading import SingletonMeta, load_processor, load_tokenizer
from slime.config.engine_groups import engines_of
from slime.core.types import Group, Sample
from slime.rollout.base_types import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    as_eval_output,
    as_train_output,
)
from slime.rollout.context import is_aborting
from slime.rollout.group_task import run_group, run_sample
from slime.rollout.hook_calls import call_slots
from slime.rollout.sampling import rollout_sampling_params

if TYPE_CHECKING:
    from slime.config.arguments import Args


class GenerateState(metaclass=SingletonMeta):
    """The tokenizer, sampling parameters and limit of requests of a run, for generate functions."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = load_processor(args.hf_checkpoint)
        self.sampling_params = rollout_sampling_params(args)
        self._limit = args.sglang_server_concurrency * max(len(engines_of(args)), 1)

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Return the running event loop's semaphore, for as many requests as the engines take."""
        return call_slots(self._limit, "GenerateState")

    @property
    def aborted(self) -> bool:
        """Return whether the batch is full and running requests are being aborted."""
        return is_aborting()


async def generate_and_rm(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate and score one sample; with --group-rm its group is scored later."""
    samples = await run_sample(args, sample, sampling_params, evaluation, score=not args.group_rm)
    return samples[0] if len(samples) == 1 else samples


async def generate_and_rm_group(
    args: Args, group: Group, sampling_params: dict[str, Any], evaluation: bool = False
) -> Group:
    """Generate and score the samples of one prompt."""
    return await run_group(args, group, sampling_params, evaluation=evaluation)


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function and wrap a bare list of groups or dictionary of datasets."""
    result = fn(*args, evaluation=evaluation, **kwargs)
    path = f"{fn.__module__}.{fn.__qualname__}"
    return as_eval_output(result, path) if evaluation else as_train_output(result, path)
