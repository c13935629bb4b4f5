"""All hooks that flags can name, resolved and checked at start, before anything expensive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.config import hook_types as trainer
from slime.config.flags.spec import option_of
from slime.config.reward_types import REWARD_TYPES, reward_type
from slime.core.errors import ConfigError, UserError
from slime.core.types import Group
from slime.rollout import base_types as rollout
from slime.rollout.rm_hub import tasks_of_run
from slime.rollout.sandbox import check_sandbox
from slime.utils.load_function import load_class, load_function

if TYPE_CHECKING:
    from slime.config.arguments import Args

HOOKS: dict[str, type] = {
    "rollout_function_path": rollout.RolloutFunction,
    "eval_function_path": rollout.RolloutFunction,
    "custom_generate_function_path": rollout.GenerateFunction,
    "custom_rm_path": rollout.RewardFunction,
    "dynamic_sampling_filter_path": rollout.DynamicSamplingFilter,
    "buffer_filter_path": rollout.BufferFilter,
    "rollout_sample_hook_path": rollout.RolloutSampleHook,
    "rollout_sample_filter_path": rollout.RolloutSampleFilter,
    "rollout_all_samples_process_path": rollout.AllSamplesProcess,
    "rollout_data_postprocess_path": trainer.RolloutDataPostprocess,
    "custom_reward_post_process_path": rollout.RewardPostProcess,
    "custom_convert_samples_to_train_data_path": rollout.ConvertSamples,
    "custom_advantage_function_path": trainer.AdvantageFunction,
    "custom_loss_function_path": trainer.LossFunction,
    "custom_tis_function_path": trainer.TisFunction,
    "custom_pg_loss_reducer_function_path": trainer.PgLossReducer,
    "custom_rollout_log_function_path": rollout.RolloutLogFunction,
    "custom_eval_rollout_log_function_path": rollout.EvalLogFunction,
    "data_source_path": rollout.DataSource,
    "custom_model_provider_path": trainer.ModelProvider,
    "custom_megatron_init_path": trainer.MegatronInit,
    "custom_megatron_before_log_prob_hook_path": trainer.BeforeLogProbHook,
    "custom_megatron_before_train_step_hook_path": trainer.BeforeTrainStepHook,
}


def check_stored_functions(args: Args, groups: list[Group]) -> None:
    """Refuse functions that samples of a checkpoint name, unless a flag names one of the same package.

    Otherwise the author of a checkpoint could choose which code this run imports and calls.
    """
    sources: list[Any] = [args, *args.eval_datasets]
    named = {getattr(source, name, None) for source in sources for name in HOOKS}
    packages = {path.split(".")[0] for path in named if path} - {"slime"}
    for sample in (sample for group in groups for sample in group):
        for field in ("custom_rm_path", "generate_function_path"):
            path = getattr(sample, field)
            if path and path not in named and path.split(".")[0] not in packages:
                raise UserError(
                    f"sample {sample.index} of the checkpoint names the function {path} "
                    f"({field}), and no flag of this run names one of that package: start from its "
                    "weights alone (--ref-load), or name a function of that package by a --custom-*-path flag"
                )


def check_hooks(args: Args) -> None:
    """Raise ConfigError with the flag and the expected signature for the first hook that is wrong."""
    for name in HOOKS:
        path = getattr(args, name)
        if path is not None:
            _check(name, path, option_of(name), args.group_rm)
    for dataset in args.eval_datasets:
        for name in ("custom_rm_path", "custom_generate_function_path"):
            if (path := getattr(dataset, name)) is not None:
                where = f"{name} of the evaluation dataset {dataset.name}"
                _check(name, path, where, args.group_rm)
    _check_placement(args)
    _check_rewards(args)


def _check_placement(args: Args) -> None:
    path = args.rollout_function_path
    fn = load_function(path, flag="--rollout-function-path", protocol=rollout.RolloutFunction)
    if getattr(fn, "never_stops", False) and (args.colocate or args.offload_rollout):
        raise ConfigError(
            f"--rollout-function-path {path} generates while the trainer works, on its own GPUs: "
            "remove --colocate and --offload, and set --rollout-num-gpus"
        )


def _check(name: str, path: str, flag: str, group_rm: bool) -> None:
    if name == "data_source_path":
        load_class(path, flag=flag, protocol=HOOKS[name])
        return
    of_groups = name == "custom_rm_path" and group_rm
    protocol = rollout.GroupRewardFunction if of_groups else HOOKS[name]
    is_generate = name == "custom_generate_function_path"
    load_function(path, flag=flag, protocol=protocol, must_be_async=is_generate)


def _check_rewards(args: Args) -> None:
    """Refuse reward types that cannot run here, including those of --allow-row-rm-types."""
    used = [("--rm-type", args.rm_type, args.custom_rm_path, "--reward-key", args.reward_key)]
    for name in args.allow_row_rm_types:
        used.append(("--allow-row-rm-types", name, None, "--reward-key", args.reward_key))
    for one in args.eval_datasets:
        where, key = f"rm_type of {one.name}", one.reward_key or args.eval_reward_key
        used.append((where, one.rm_type, one.custom_rm_path, "--eval-reward-key", key))
    if tasks_of_run(args) and args.custom_rm_path is None:
        used.append(("rows of", "reasoning_gym", None, "--reward-key", args.reward_key))
    for where, name, custom_path, key_flag, key in used:
        if name is None or custom_path is not None:
            continue
        kind = reward_type(name, where)
        if kind.sandboxed and not args.allow_unsandboxed_code:
            check_sandbox()
        if kind is REWARD_TYPES["remote_rm"] and not args.rm_url:
            raise ConfigError(f"{where} {name} needs the address of the service: --rm-url")
        if kind.keys and key is None:
            raise ConfigError(
                f"{where} {name} gives {', '.join(kind.keys)}: add {key_flag} {kind.keys[0]}"
            )
