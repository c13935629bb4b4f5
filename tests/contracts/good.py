"""Each hook with every parameter, as a careful user writes it. Named after the flags."""

from __future__ import annotations

from typing import Any

import torch

from slime.core.types import Sample, Status
from slime.rollout.base_types import (
    DynamicFilterOutput,
    EvalResult,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
)
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import generate


def rollout_function_path(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        result = EvalResult(rewards=[1.0], truncated=[False], samples=[_done(Sample(prompt="x"))])
        return RolloutFnEvalOutput(data={"own": result}, metrics={"eval/extra": 1.0})
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            _done(sample)
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/extra": 2.0})


eval_function_path = rollout_function_path


def _done(sample: Sample) -> Sample:
    sample.tokens = sample.tokens or [1]
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0])
    sample.status, sample.reward = Status.COMPLETED, 1.0
    return sample


async def custom_generate_function_path(args, sample, sampling_params, evaluation=False):
    return await generate(args, sample, {**sampling_params, "temperature": 0.5})


async def custom_rm_path(args, sample):
    return await async_rm(args.replace(rm_type="random", custom_rm_path=None), sample)


async def custom_group_rm_path(args, samples):
    return [{"score": float(number)} for number, _ in enumerate(samples)]


def dynamic_sampling_filter_path(args, samples, **kwargs):
    return DynamicFilterOutput(keep=samples[0].group_index > 0, reason="first")


def buffer_filter_path(args, rollout_id, buffer, num_samples):
    taken, buffer[:] = buffer[-num_samples:], buffer[:-num_samples]
    return taken


async def rollout_sample_hook_path(args, sample):
    sample.metadata["hooked"] = sample.reward
    return [sample, sample.clone()] if sample.index == 0 else sample


def rollout_sample_filter_path(args, groups):
    groups[0][0].remove_sample = True


def rollout_all_samples_process_path(args, all_groups, data_source):
    for group in all_groups:
        for sample in group:
            sample.metadata["seen"] = len(data_source)


def rollout_data_postprocess_path(args, rollout_id, rollout_data):
    rollout_data.advantages = [row * 0 for row in rollout_data.advantages]


def custom_reward_post_process_path(args, samples):
    raw = [sample.reward for sample in samples]
    return raw, [reward - 0.5 for reward in raw]


def custom_convert_samples_to_train_data_path(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [2.0 for _ in samples],
        "raw_reward": [s.reward for s in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [s.index for s in samples],
        "loss_masks": [[1] * s.response_length for s in samples],
    }


def custom_advantage_function_path(args, rollout_data):
    rollout_data.advantages = [mask * 0.0 for mask in rollout_data.loss_masks]
    rollout_data.returns = rollout_data.advantages


def custom_loss_function_path(args, batch, logits, sum_of_sample_mean):
    loss = sum_of_sample_mean(logits.float().logsumexp(-1))
    return loss, {"my_loss": loss.detach()}


def custom_tis_function_path(
    *, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
    response_lengths, **kwargs: Any,
):  # fmt: skip
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * ratio.clamp(max=2.0), loss_masks, {"ratio": ratio}


def custom_pg_loss_reducer_function_path(
    total_lengths, response_lengths, loss_masks, calculate_per_token_loss
):
    return lambda losses: losses.sum() / max(response_lengths)


def custom_rollout_log_function_path(rollout_id, args, samples, extra_metrics, rollout_time):
    return True


def custom_eval_rollout_log_function_path(rollout_id, args, data, extra_metrics):
    return True


class data_source_path(RolloutDataSourceWithBuffer):
    """The built-in one with a difference."""

    def get_samples(self, num_samples):
        return super().get_samples(num_samples)[::-1]


def custom_model_provider_path(pre_process, post_process, vp_stage=None):
    return torch.nn.Identity()


def custom_megatron_init_path(args):
    pass


def custom_megatron_before_log_prob_hook_path(args, model, store_prefix):
    pass


def custom_megatron_before_train_step_hook_path(
    args, rollout_id, step_id, model, optimizer, opt_param_scheduler
):
    pass
