"""Every hook a flag can name: resolved once at start, before anything expensive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.rollout import base_types as t
from slime.rollout.rm_hub.types import check_rm_type
from slime.utils.errors import ConfigError
from slime.utils.load_function import load_class, load_function

if TYPE_CHECKING:
    from slime.utils.arguments import Args

HOOKS: dict[str, type] = {
    "rollout_function_path": t.RolloutFunction,
    "eval_function_path": t.RolloutFunction,
    "custom_generate_function_path": t.GenerateFunction,
    "custom_rm_path": t.RewardFunction,
    "dynamic_sampling_filter_path": t.DynamicSamplingFilter,
    "buffer_filter_path": t.BufferFilter,
    "rollout_sample_filter_path": t.RolloutSampleFilter,
    "rollout_all_samples_process_path": t.AllSamplesProcess,
    "rollout_data_postprocess_path": t.RolloutDataPostprocess,
    "custom_reward_post_process_path": t.RewardPostProcess,
    "custom_convert_samples_to_train_data_path": t.ConvertSamples,
    "custom_advantage_function_path": t.AdvantageFunction,
    "custom_loss_function_path": t.LossFunction,
    "custom_tis_function_path": t.TisFunction,
    "custom_pg_loss_reducer_function_path": t.PgLossReducer,
    "custom_rollout_log_function_path": t.RolloutLogFunction,
    "custom_eval_rollout_log_function_path": t.EvalLogFunction,
    "data_source_path": t.DataSource,
    "custom_model_provider_path": t.ModelProvider,
    "custom_megatron_init_path": t.MegatronInit,
    "custom_megatron_before_log_prob_hook_path": t.BeforeLogProbHook,
    "custom_megatron_before_train_step_hook_path": t.BeforeTrainStepHook,
}
_CLASSES = ("data_source_path",)
_ASYNC = ("custom_generate_function_path",)


def check_hooks(args: Args) -> None:
    """ConfigError, naming the flag and the expected signature, for the first hook that is not right."""
    for name, protocol in HOOKS.items():
        path = getattr(args, name)
        if path is None:
            continue
        flag = "--" + name.replace("_", "-")
        if name in _CLASSES:
            load_class(path, flag=flag, protocol=protocol)
            continue
        if name == "custom_rm_path" and args.group_rm:
            protocol = t.GroupRewardFunction
        load_function(path, flag=flag, protocol=protocol, must_be_async=name in _ASYNC)
    _check_reward(args)


def _check_reward(args: Args) -> None:
    if args.rm_type is not None:
        check_rm_type(args.rm_type)
    if args.rm_type == "remote_rm" and not args.rm_url:
        raise ConfigError("--rm-type remote_rm needs the address of the service: --rm-url")
