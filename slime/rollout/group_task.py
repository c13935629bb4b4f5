"""Generate, score and abort groups; a hook that fails marks only the samples that it was called with."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Group, Sample, Status
from slime.data.tokenizer import eos_token_id
from slime.rollout.base_types import GenerateFunction, Reward, RolloutSampleHook
from slime.rollout.context import RolloutContext, current_generation, is_aborting
from slime.rollout.engine_pool import EngineRefusedError
from slime.rollout.hook_calls import call_function, run_hook
from slime.rollout.rm_hub import (
    async_rm,
    check_number,
    check_reward,
    custom_function,
    group_rm,
)
from slime.rollout.samples import fill_empty_response, group_index, mark_failed
from slime.rollout.sampling import SamplingParams, generate
from slime.utils.http import gather
from slime.utils.load_function import accepts, load_function

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

GENERATE_TIMEOUT_S = 7200.0  # of a custom function, the same as of one request to an engine
SAMPLE_HOOK_TIMEOUT_S = 600.0
_ABORT_EVERY_S = 1.0
_ABORT_TIMEOUT_S = 60.0
_MAX_FAILURE_KINDS = 50  # whose tracebacks are logged
_GENERATED = (Status.COMPLETED, Status.TRUNCATED)


async def run_group(
    args: Args,
    group: Group,
    sampling_params: SamplingParams,
    *,
    evaluation: bool = False,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Group:
    """Return the scored group, with more samples than `group` where a trajectory was split into several.

    ABORTED samples are not scored. A wrong setting (UserError) ends the run; any other exception of a
    hook marks its sample FAILED, and one of a --group-rm function all samples of the group.
    """
    score_alone, is_new = not args.group_rm, not all(map(_is_finished, group))
    trajectories = await gather(
        run_sample(args, sample, sampling_params, evaluation, score_alone, on_sample)
        for sample in group
    )
    samples = [sample for trajectory in trajectories for sample in trajectory]
    if not score_alone:
        await _score_group(args, samples, evaluation)
        if is_new and not evaluation and not any(s.status == Status.ABORTED for s in samples):
            pairs = zip(trajectories, group, strict=True)
            trajectories = await gather(_call_sample_hook(args, *pair) for pair in pairs)
            samples = [sample for trajectory in trajectories for sample in trajectory]
    for sample in samples:
        if sample.response_length == 0 and sample.status != Status.ABORTED:
            fill_empty_response(sample, eos_token_id(args.hf_checkpoint))
    return samples


async def run_sample(
    args: Args,
    sample: Sample,
    sampling_params: SamplingParams,
    evaluation: bool,
    score: bool,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Return the samples of one trajectory, scored alone with `score`."""
    if _is_finished(sample):  # in an earlier rollout
        return [sample]
    samples = [sample]
    if sample.status not in _GENERATED:
        before = sample.clone()  # a hook that fails half way may leave inconsistent fields
        call = _generate(args, sample, dict(sampling_params), evaluation)
        samples = await _mark_failures("generate", [before], call) or [before]
    _assign_indices(samples, sample)
    for one in samples:
        if score and one.status in _GENERATED and one.reward is None:
            await _mark_failures("reward", [one], _score(args, one, evaluation))
        on_sample(one)
    return await _call_sample_hook(args, samples, sample) if score and not evaluation else samples


def _is_finished(sample: Sample) -> bool:
    return sample.status in _GENERATED and sample.reward is not None


def _assign_indices(samples: list[Sample], original: Sample) -> None:
    """Give the samples of one trajectory its rollout_id and each a distinct index."""
    for number, one in enumerate(samples):
        one.group_index = original.group_index
        one.rollout_id = original.index if original.rollout_id is None else original.rollout_id
        if original.index is not None:
            one.index = original.index + (number << 40)  # larger than any index of a data source


async def _generate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool
) -> list[Sample]:
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return [await generate(args, sample, sampling_params)]
    flag = (
        "sample.generate_function_path"
        if sample.generate_function_path
        else "--custom-generate-function-path"
    )
    fn = load_function(path, flag=flag, protocol=GenerateFunction, must_be_async=True)
    extra = {"evaluation": evaluation} if accepts(fn, "evaluation") else {}
    where = f"{flag} {path}"

    async def call() -> Sample | list[Sample]:
        return await fn(args, sample, sampling_params, **extra)

    result = await run_hook(
        call(),
        name=where,
        timeout_s=GENERATE_TIMEOUT_S,
        calls=current_generation().hook_calls,
    )
    samples = result if isinstance(result, list) else [result]
    _check_generated(samples, where)
    for one in samples:
        if one.reward is not None:
            one.reward = _check_key(args, check_reward(one.reward, where), evaluation)
    return samples


def _check_generated(samples: list[Sample], where: str) -> None:
    if not samples or not all(isinstance(one, Sample) for one in samples):
        raise TypeError(f"{where} returned {samples!r}; expected a Sample or a list of Samples")
    if len({id(one) for one in samples}) < len(samples):
        raise ValueError(f"{where} returned the same sample twice: it would be trained on twice")
    for one in samples:
        if one.status == Status.PENDING:
            one.status = Status.COMPLETED
        if one.status == Status.ABORTED and is_aborting():
            continue
        if one.status not in _GENERATED:
            raise RuntimeError(f"{where} returned a sample with status {one.status.value}")
        if not 0 < one.response_length < len(one.tokens):
            raise ValueError(
                f"{where} returned a sample with response_length {one.response_length} and "
                f"{len(one.tokens)} tokens; it needs a prompt and a response token at least"
            )
        for name in ("loss_mask", "rollout_log_probs"):
            column = getattr(one, name)
            if column is not None and len(column) != one.response_length:
                raise ValueError(
                    f"{where} returned {len(column)} entries of {name} for {one.response_length} "
                    "response tokens; sample.append_response_tokens keeps them aligned"
                )


async def _score(args: Args, sample: Sample, evaluation: bool) -> None:
    with current_generation().reward_clock.running():
        reward = await async_rm(args, sample)
    sample.reward = _check_key(args, reward, evaluation)


async def _score_group(args: Args, samples: list[Sample], evaluation: bool) -> None:
    generated = [sample for sample in samples if sample.status in _GENERATED]
    if any(sample.status == Status.ABORTED for sample in samples):
        return  # the group will be scored once all of its samples are finished
    if all(sample.reward is not None for sample in generated):
        return
    if custom_function(args, generated[0])[0] is None:  # --rm-type scores samples one by one
        await gather(
            _mark_failures("reward", [one], _score(args, one, evaluation)) for one in generated
        )
    else:
        await _mark_failures("reward", generated, _score_together(args, generated, evaluation))


async def _score_together(args: Args, samples: list[Sample], evaluation: bool) -> None:
    with current_generation().reward_clock.running():
        rewards = await group_rm(args, samples)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = _check_key(args, reward, evaluation)


def _check_key(args: Args, reward: Reward, evaluation: bool) -> Reward:
    """Check the number under --reward-key in a dictionary reward; other rewards were checked by `check_reward`.

    A missing key is a wrong setting and ends the run (UserError); a value that is no finite number
    fails the sample.
    """
    flag = "--eval-reward-key" if evaluation else "--reward-key"
    key = args.eval_reward_key if evaluation else args.reward_key
    if not isinstance(reward, dict):
        if key is not None and args.custom_rm_path is not None and not evaluation:
            raise ValueError(f"the reward is a number, not a dictionary: remove {flag} {key}")
        return reward
    if key not in reward:
        is_now = f", not {key}" if key else ""
        raise UserError(
            f"the reward is a dictionary: set {flag} to one of {sorted(map(str, reward))}{is_now}"
        )
    return {**reward, key: check_number(reward[key], f"{key!r} of the reward")}


async def _call_sample_hook(args: Args, samples: list[Sample], original: Sample) -> list[Sample]:
    """Return the samples of one trajectory as `--rollout-sample-hook-path` leaves them."""
    path = args.rollout_sample_hook_path
    if path is None:
        return samples
    flag = "--rollout-sample-hook-path"
    fn = load_function(path, flag=flag, protocol=RolloutSampleHook)
    results: list[Sample] = []
    for one in samples:
        if not _is_finished(one):
            results.append(one)
            continue
        if one.response_length == 0:
            fill_empty_response(one, eos_token_id(args.hf_checkpoint))
        before = one.clone()  # a hook that fails half way may leave inconsistent fields
        call = _hook_results(args, fn, one, f"{flag} {path}")
        results += await _mark_failures("sample hook", [before], call) or [before]
    _assign_indices(results, original)
    return results


async def _hook_results(
    args: Args, fn: RolloutSampleHook, sample: Sample, where: str
) -> list[Sample]:
    result = await call_function(
        fn,
        args,
        sample,
        name=where,
        kind="sample hooks",
        timeout_s=SAMPLE_HOOK_TIMEOUT_S,
        calls=current_generation().hook_calls,
    )
    samples = [sample] if result is None else result if isinstance(result, list) else [result]
    _check_generated(samples, where)
    for one in samples:
        one.reward = _check_key(args, check_reward(one.reward, where), evaluation=False)
    return samples


async def _mark_failures(
    stage: str, samples: list[Sample], call: Awaitable[list[Sample] | None]
) -> list[Sample] | None:
    """Await user code; if it raises, mark these samples FAILED and continue the run."""
    try:
        return await call
    except UserError:
        raise
    except Exception as error:
        for sample in samples:
            mark_failed(sample, stage, error)
        _log_failure(samples[0], stage, error)
        return None


def _log_failure(sample: Sample, stage: str, error: Exception) -> None:
    """Log the first failure of each kind (stage, exception, line) with its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    kind = (
        stage,
        type(error).__name__,
        (frames[-1].filename, frames[-1].lineno) if frames else None,
    )
    logged = RolloutContext.current().shared("kinds of failures", set[object])
    first = kind not in logged and len(logged) < _MAX_FAILURE_KINDS
    level = logging.WARNING if first else logging.DEBUG
    logged.add(kind)
    text = "sample %s failed in %s; further failures of this kind are counted only"
    shown = None if isinstance(error, EngineRefusedError) else error
    logger.log(level, f"{text}: %s", sample.index, stage, sample.metadata["error"], exc_info=shown)


async def abort_groups(
    running: Mapping[asyncio.Task[Group], Group], context: RolloutContext
) -> list[Group]:
    """Abort the tasks and return their groups in order, with partial responses if the run keeps them.

    `running` maps each task to its group as it was taken from the data source.
    """
    generation = context.generation
    assert generation is not None
    if not running:
        return []
    generation.aborting = True
    if generation.keep_partial:
        await _abort_until_done(running, context)
    else:
        await context.pool.abort_all()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    groups = [
        _partial_group(task, group) if generation.keep_partial else group
        for task, group in running.items()
    ]
    return sorted(groups, key=group_index)


async def _abort_until_done(
    running: Mapping[asyncio.Task[Group], Group], context: RolloutContext
) -> None:
    """Abort repeatedly: an engine does not abort a request that had not reached it yet."""
    for _ in range(round(_ABORT_TIMEOUT_S / _ABORT_EVERY_S)):
        await context.pool.abort_all()
        _, left = await asyncio.wait(running, timeout=_ABORT_EVERY_S)
        if not left:
            return
    logger.warning("%d groups did not end when aborted; they will be restarted", len(left))


def _partial_group(task: asyncio.Task[Group], taken: Group) -> Group:
    """Return the group with its partial responses if they can be continued, else as it was taken."""
    if not task.cancelled() and task.exception() is None:
        group = task.result()
        if len(group) == len(taken) and not any(s.status == Status.FAILED for s in group):
            return group
    return taken
