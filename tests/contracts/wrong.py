"""Each hook with a signature that the call does not fit."""

from __future__ import annotations


def rollout_function_path(args, rollout_id, data_source):  # no evaluation
    pass


eval_function_path = rollout_function_path


def custom_generate_function_path(args, sample, sampling_params):  # not async
    return sample


async def custom_rm_path(sample):
    return 1.0


async def custom_group_rm_path(args, samples, weights):
    return []


def dynamic_sampling_filter_path(samples):
    return True


def buffer_filter_path(buffer, num_samples):
    return []


def rollout_sample_hook_path(sample):
    pass


def rollout_sample_filter_path(args):
    pass


def rollout_all_samples_process_path(args, all_groups):
    pass


def rollout_data_postprocess_path(rollout_data):
    pass


def custom_reward_post_process_path(samples):
    pass


def custom_convert_samples_to_train_data_path():
    pass


def custom_advantage_function_path(args, rollout_data, more):
    pass


def custom_loss_function_path(args, logits):
    pass


def custom_tis_function_path(args, pg_loss):
    pass


def custom_pg_loss_reducer_function_path(loss):
    pass


def custom_rollout_log_function_path(rollout_id, samples):
    pass


def custom_eval_rollout_log_function_path(data):
    pass


class data_source_path:
    def __init__(self, args):
        pass

    def get_samples(self, num_samples):
        return []


def custom_model_provider_path(config):
    pass


def custom_megatron_init_path():
    pass


def custom_megatron_before_log_prob_hook_path(model):
    pass


def custom_megatron_before_train_step_hook_path(args, model):
    pass
