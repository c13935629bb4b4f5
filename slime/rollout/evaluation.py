"""Evaluation on the named datasets of `--eval-prompt-data` or `--eval-config`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Group, Sample, Status
from slime.data.prompt_data import DataFormat, PromptDataset, load_prompts
from slime.data.tokenizer import load_tokenizer
from slime.rollout.base_types import EvalResult, RolloutFnEvalOutput
from slime.rollout.context import GenerationState, RolloutContext
from slime.rollout.data_source import data_format_of
from slime.rollout.group_task import run_group
from slime.rollout.hook_calls import in_thread
from slime.rollout.metrics import Progress, eval_metrics
from slime.rollout.sampling import sampling_params
from slime.utils.http import gather

if TYPE_CHECKING:
    from slime.config.arguments import Args, EvalDataset

logger = logging.getLogger(__name__)


async def evaluate(args: Args, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all datasets concurrently."""
    if not args.eval_datasets:
        raise UserError("there is no evaluation dataset: add --eval-prompt-data NAME PATH")
    progress = RolloutContext.current().progress.start(
        Progress(rollout_id=rollout_id, evaluation=True, finished=False)
    )
    results = await gather(_evaluate_one(args, dataset, progress) for dataset in args.eval_datasets)
    progress.finished = True
    output = RolloutFnEvalOutput(data={})
    for dataset, samples in zip(args.eval_datasets, results, strict=True):
        reward_key = dataset.reward_key or args.eval_reward_key
        output.data[dataset.name] = EvalResult(
            rewards=[sample.get_reward_value(reward_key) for sample in samples],
            truncated=[sample.status == Status.TRUNCATED for sample in samples],
            samples=samples,
        )
    output.metrics = eval_metrics(output.data)
    return output


async def _evaluate_one(args: Args, dataset: EvalDataset, progress: Progress) -> list[Sample]:
    args = dataset_args(args, dataset)
    seed_parts = (args.rollout_seed, "eval", dataset.name) if args.deterministic else ()
    state = GenerationState(seed_parts=seed_parts, hook_calls=progress.hook_calls)
    params = sampling_params(
        args,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
        max_new_tokens=dataset.max_response_len,
    )
    if dataset.min_new_tokens is not None:
        params["min_new_tokens"] = dataset.min_new_tokens
    with RolloutContext.current().for_generation(state).active():
        groups = await in_thread(_make_groups, args, dataset)
        progress.target_groups += len(groups)
        done = await gather(
            run_group(args, group, params, evaluation=True, on_sample=progress.count)
            for group in groups
        )
    samples = [sample for group in done for sample in group]
    _check_failures(samples, dataset.name)
    return samples


def dataset_args(args: Args, dataset: EvalDataset) -> Args:
    """Return the run's arguments with the dataset's own settings; its reward type replaces the run's."""
    own = {flag: getattr(dataset, name) for name, flag in _FLAG_OF_SETTING.items()}
    values = {flag: value for flag, value in own.items() if value is not None}
    if dataset.rm_type is not None:
        values.setdefault("custom_rm_path", None)
    return args.replace(**values) if values else args


_FLAG_OF_SETTING = {
    "rm_type": "rm_type",
    "rm_grading": "rm_grading",
    "custom_rm_path": "custom_rm_path",
    "reward_key": "eval_reward_key",
    "custom_generate_function_path": "custom_generate_function_path",
    "metadata_key": "metadata_key",
    "tool_key": "tool_key",
    "max_context_len": "rollout_max_context_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
}


def _make_groups(args: Args, dataset: EvalDataset) -> list[Group]:
    prompts = _load(args, dataset)
    size = dataset.n_samples_per_prompt
    groups = [[prompts.make_sample(row) for _ in range(size)] for row in range(len(prompts))]
    for row, group in enumerate(groups):
        for number, sample in enumerate(group):
            sample.group_index = row
            sample.index = sample.rollout_id = row * size + number
            sample.session_id = f"eval-{dataset.name}-{row}"
    return groups


def _load(args: Args, dataset: EvalDataset) -> PromptDataset:
    """Return the prompts of the dataset; datasets that read a file in the same way share them."""
    data_format = eval_format(args, dataset)
    key = (dataset.path, repr(replace(data_format, data_flag="")))
    tokenizer = load_tokenizer(args.hf_checkpoint)
    return RolloutContext.current().shared(
        key, lambda: load_prompts(dataset.path, data_format, tokenizer)
    )


def eval_format(args: Args, dataset: EvalDataset) -> DataFormat:
    """Return how an evaluation dataset is read, from the flags and its own settings."""
    return replace(
        data_format_of(dataset_args(args, dataset)),
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        max_prompt_len=dataset.max_prompt_len,
        max_prompt_flag="--eval-max-prompt-len",
        data_flag=f"--eval-prompt-data {dataset.name}",
        input_flag="--eval-input-key",
        label_flag="--eval-label-key",
    )


def _check_failures(samples: list[Sample], name: str) -> None:
    failed = [sample for sample in samples if sample.status == Status.FAILED]
    if not failed:
        return
    metadata = failed[0].metadata
    if len(failed) == len(samples):
        raise UserError(
            f"every sample of the evaluation on {name} failed (the first one in "
            f"{metadata['error_stage']}):\n{metadata['error_traceback']}"
        )
    logger.warning(
        "%d of %d samples of the evaluation on %s failed and are not counted; the first one in %s: %s",
        len(failed), len(samples), name, metadata["error_stage"], metadata["error"],
    )  # fmt: skip
