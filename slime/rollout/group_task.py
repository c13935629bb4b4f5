"""One group: generate every sibling, score it, and keep a hook's failure to its own sample."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Group, Sample, Status
from slime.data.tokenizer import eos_token_id
from slime.rollout.base_types import GenerateFunction
from slime.rollout.generate_call import current_calls, generate, is_aborting
from slime.rollout.rm_hub import Reward, async_rm, check_number, group_rm
from slime.rollout.samples import clone_sample, fill_empty_response, mark_failed
from slime.rollout.sampling import SamplingParams
from slime.rollout.user_code import contain
from slime.utils.http import gather
from slime.utils.load_function import accepts, load_function

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

GENERATE_TIME_LIMIT_S = 7200.0  # of a custom function, as of one request to an engine
_GENERATED = (Status.COMPLETED, Status.TRUNCATED)


async def run_group(
    args: Args,
    group: Group,
    sampling_params: SamplingParams,
    *,
    evaluation: bool = False,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Group:
    """The scored group: flat, longer than `group` where custom generation returned several samples.

    Samples that are still ABORTED are not scored. A user's mistake in the settings (UserError) ends
    the run; any other exception of a hook marks its sample FAILED.
    """
    score_alone = not args.group_rm
    executions = await gather(
        _run_sample(args, sample, sampling_params, evaluation, score_alone, on_sample)
        for sample in group
    )
    samples = [sample for execution in executions for sample in execution]
    if not score_alone:
        await _score_group(args, samples, evaluation)
    for sample in samples:
        if sample.response_length == 0 and sample.status != Status.ABORTED:
            fill_empty_response(sample, eos_token_id(args.hf_checkpoint))
    return samples


async def _run_sample(
    args: Args,
    sample: Sample,
    sampling_params: SamplingParams,
    evaluation: bool,
    score: bool,
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    if sample.status in _GENERATED and sample.reward is not None:  # came back from the buffer whole
        return [sample]
    samples = [sample]
    if sample.status not in _GENERATED:
        as_it_was = clone_sample(sample)  # what a failure half way leaves may not fit together
        generate_it = _generate(args, sample, dict(sampling_params), evaluation)
        samples = await _guard("generate", [as_it_was], generate_it) or [as_it_was]
    _number_siblings(samples, sample)
    for one in samples:
        if score and one.status in _GENERATED and one.reward is None:
            await _guard("reward", [one], _score(args, one, evaluation))
        on_sample(one)
    return samples


def _number_siblings(samples: list[Sample], execution: Sample) -> None:
    """Several samples of one execution share its rollout_id and have an index each."""
    for number, one in enumerate(samples):
        one.group_index = execution.group_index
        one.rollout_id = execution.index if execution.rollout_id is None else execution.rollout_id
        if execution.index is not None:
            one.index = execution.index + (number << 40)  # beyond any index a data source counts to


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

    result = await contain(call(), what=where, limit_s=GENERATE_TIME_LIMIT_S, calls=current_calls())
    samples = result if isinstance(result, list) else [result]
    _check_generated(samples, where)
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
    sample.reward = _check_key(args, await async_rm(args, sample), evaluation)


async def _score_group(args: Args, samples: list[Sample], evaluation: bool) -> None:
    generated = [sample for sample in samples if sample.status in _GENERATED]
    if len(generated) < len(samples) and any(s.status == Status.ABORTED for s in samples):
        return  # the group will be scored once it is whole
    if generated and any(sample.reward is None for sample in generated):
        await _guard("reward", generated, _score_together(args, generated, evaluation))


async def _score_together(args: Args, samples: list[Sample], evaluation: bool) -> None:
    for sample, reward in zip(samples, await group_rm(args, samples), strict=True):
        sample.reward = _check_key(args, reward, evaluation)


def _check_key(args: Args, reward: Reward, evaluation: bool) -> Reward:
    """A dictionary without the number the run asks for is a wrong setting, not a bad sample."""
    flag = "--eval-reward-key" if evaluation else "--reward-key"
    key = args.eval_reward_key if evaluation else args.reward_key
    if not isinstance(reward, dict):
        return reward
    if key not in reward:
        is_now = f", not {key}" if key else ""
        raise UserError(
            f"the reward is a dictionary: set {flag} to one of {sorted(map(str, reward))}{is_now}"
        )
    return {**reward, key: check_number(reward[key], f"{key!r} of the reward")}


async def _guard(
    stage: str, samples: list[Sample], call: Awaitable[list[Sample] | None]
) -> list[Sample] | None:
    """The boundary to user code: what it raises marks these samples, and the run goes on."""
    try:
        return await call
    except UserError:
        raise
    except Exception as error:
        for sample in samples:
            mark_failed(sample, stage, error)
        logger.debug("sample %s failed in %s", samples[0].index, stage, exc_info=True)
        return None
