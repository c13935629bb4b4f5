"""Each hook with the least that works: other names, no optional parameter, bare return values."""

from __future__ import annotations

import torch

from slime.core.types import Sample
from slime.rollout.sglang_rollout import generate


def rollout_function_path(args, i, source, *, evaluation):
    if evaluation:
        return {"own": {"rewards": [1.0], "truncated": [False]}}
    groups = source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 1.0
    return groups


eval_function_path = rollout_function_path


async def custom_generate_function_path(args, sample, sampling_params):
    return [await generate(args, sample, sampling_params)]


def custom_rm_path(args, sample):
    return True


def custom_group_rm_path(args, samples):
    return [1] * len(samples)


def dynamic_sampling_filter_path(args, samples):
    return samples[0].group_index > 0


def buffer_filter_path(*args):
    return [args[2].pop()]


def rollout_sample_hook_path(args, sample):
    pass


def rollout_sample_filter_path(args, groups):
    pass


def rollout_all_samples_process_path(args, groups, source):
    pass


def rollout_data_postprocess_path(*_):
    pass


def custom_reward_post_process_path(args, samples):
    return [1.0] * len(samples), [0.5] * len(samples)


def custom_convert_samples_to_train_data_path(args, samples):
    return {}


def custom_advantage_function_path(args, data):
    pass


def custom_loss_function_path(args, batch, logits, reduce):
    return logits.sum(), {}


def custom_tis_function_path(**kwargs):
    return kwargs["pg_loss"], kwargs["loss_masks"], {}


def custom_pg_loss_reducer_function_path(*lens):
    return torch.sum


def custom_rollout_log_function_path(*_):
    pass


def custom_eval_rollout_log_function_path(*_):
    pass


class data_source_path:
    def __init__(self, args):
        self.given = 0

    def get_samples(self, n):
        groups = []
        for _ in range(n):
            groups.append([Sample(prompt="1+1=", index=self.given, group_index=self.given)])
            self.given += 1
        return groups

    def add_samples(self, groups):
        pass

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 1


def custom_model_provider_path(pre_process, post_process):
    return torch.nn.Identity()


def custom_megatron_init_path(args):
    pass


def custom_megatron_before_log_prob_hook_path(*_):
    pass


def custom_megatron_before_train_step_hook_path(*_):
    pass
