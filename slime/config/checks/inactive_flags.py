"""Flags that do nothing because of others: each that the user set is at least said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.config.derive import PLAIN_ROLLOUT, SFT_ROLLOUT
from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of

_PLAIN_SOURCE = "slime.rollout.data_source.RolloutDataSource"

# flag -> the one that must be set for them to do anything
_NEEDED = {
    "use_wandb": (
        "wandb_mode", "wandb_dir", "wandb_key", "wandb_host", "wandb_team", "wandb_group",
        "wandb_project", "wandb_run_id",
    ),
    "use_tensorboard": ("tb_project_name", "tb_experiment_name"),
    "optimizer_cpu_offload": ("overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"),
    "recompute_granularity": ("recompute_method", "recompute_num_layers"),
    "save": ("async_save", "no_save_optim", "save_total_limit"),
    "use_dynamic_batch_size": ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu"),
    "use_tis": ("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "custom_tis_function_path"),
    "overlong_buffer_len": ("overlong_penalty_factor",),
    "use_opd": ("opd_type", "opd_kl_coef", "opd_teacher_load"),
    "use_kl_loss": ("use_unbiased_kl",),
    "use_fault_tolerance": (
        "rollout_health_check_interval", "rollout_health_check_timeout",
        "rollout_health_check_first_wait",
    ),
    "eval_interval": (
        "eval_prompt_data", "eval_config", "eval_function_path", "eval_temperature", "eval_top_p",
        "eval_top_k", "eval_max_response_len", "eval_input_key", "eval_label_key",
        "eval_reward_key", "n_samples_per_eval_prompt", "skip_eval_before_train",
        "custom_eval_rollout_log_function_path",
    ),
}  # fmt: skip


@dataclass(kw_only=True, frozen=True)
class Inert:
    """These flags do nothing while `when` holds, which `why` puts into words."""

    flags: tuple[str, ...]
    when: Callable[[Draft], bool]
    why: str


def _set(name: str) -> Callable[[Draft], bool]:
    return lambda draft: bool(draft[name])


_OF_THE_LOSS = (
    "advantage_estimator", "eps_clip", "eps_clip_high", "eps_clip_c", "kl_coef", "use_kl_loss",
    "entropy_coef", "normalize_advantages", "use_tis", "use_rollout_logprobs", "overlong_buffer_len",
    "custom_advantage_function_path", "custom_pg_loss_reducer_function_path",
    "disable_grpo_std_normalization", "disable_rewards_normalization",
)  # fmt: skip
_OF_SAMPLING = (
    "dynamic_sampling_filter_path", "over_sampling_batch_size", "partial_rollout",
    "rollout_sample_filter_path", "rollout_all_samples_process_path", "max_weight_staleness",
)  # fmt: skip
_OF_MUON = (
    "muon_momentum", "muon_use_nesterov", "muon_num_ns_steps", "muon_scale_mode",
    "muon_extra_scale_factor", "muon_split_qkv", "muon_fp32_matmul_prec", "muon_tp_mode",
)  # fmt: skip
_RULES = (
    Inert(
        flags=("adam_beta1", "adam_beta2", "adam_eps"),
        when=lambda draft: draft["optimizer"] == "sgd",
        why="with --optimizer sgd",
    ),
    Inert(
        flags=("sgd_momentum",),
        when=lambda draft: draft["optimizer"] != "sgd",
        why="without --optimizer sgd",
    ),
    Inert(
        flags=_OF_MUON,
        when=lambda draft: draft["optimizer"] not in ("muon", "dist_muon"),
        why="without --optimizer muon",
    ),
    Inert(
        flags=("value_clip", "num_critic_only_steps", "critic_load", "critic_save", "critic_lr", "lambd"),
        when=lambda draft: draft["advantage_estimator"] != "ppo",
        why="without --advantage-estimator ppo",
    ),
    Inert(
        flags=("gamma",),
        when=lambda draft: draft["advantage_estimator"] not in ("ppo", "reinforce_plus_plus"),
        why="without --advantage-estimator ppo or reinforce_plus_plus",
    ),
    Inert(
        flags=("disable_grpo_std_normalization",),
        when=lambda draft: draft["advantage_estimator"] not in ("grpo", "gspo", "cispo"),
        why="with an --advantage-estimator that divides by no standard deviation",
    ),
    Inert(
        flags=("eps_clip_c",),
        when=lambda draft: draft["advantage_estimator"] == "cispo",
        why="with --advantage-estimator cispo",
    ),
    Inert(
        flags=("kl_loss_type", "ref_update_interval"),
        when=lambda draft: not draft["use_kl_loss"] and not draft["kl_coef"],
        why="without --use-kl-loss or --kl-coef",
    ),
    Inert(
        flags=("apply_chat_template_kwargs",),
        when=lambda draft: (
            not draft["apply_chat_template"]
            and not draft["custom_generate_function_path"]
            and draft["rollout_function_path"] == PLAIN_ROLLOUT
        ),
        why="without --apply-chat-template",
    ),
    Inert(
        flags=("mask_offpolicy_in_partial_rollout",),
        when=lambda draft: (
            not draft["partial_rollout"] and draft["rollout_function_path"] == PLAIN_ROLLOUT
        ),
        why="without --partial-rollout",
    ),
    Inert(
        flags=("group_rm",),
        when=lambda draft: not draft["custom_rm_path"],
        why="without --custom-rm-path: built-in rewards look at one sample each",
    ),
    Inert(
        flags=("buffer_filter_path",),
        when=lambda draft: draft["data_source_path"] == _PLAIN_SOURCE,
        why=f"with --data-source-path {_PLAIN_SOURCE}, which has no buffer",
    ),
    Inert(
        flags=("update_weight_disk_dir",),
        when=lambda draft: draft["update_weight_transport"] != "disk",
        why="without --update-weight-transport disk",
    ),
    Inert(
        flags=_OF_SAMPLING,
        when=lambda draft: draft["rollout_function_path"] == SFT_ROLLOUT,
        why=f"with --rollout-function-path {SFT_ROLLOUT}",
    ),
    Inert(
        flags=_OF_THE_LOSS,
        when=lambda draft: draft["loss_type"] == "sft_loss",
        why="with --loss-type sft_loss",
    ),
    Inert(
        flags=("overlong_buffer_len", "disable_grpo_std_normalization", "disable_rewards_normalization"),
        when=_set("custom_reward_post_process_path"),
        why="with --custom-reward-post-process-path, which does that",
    ),
    Inert(
        flags=("overlong_buffer_len", "custom_reward_post_process_path"),
        when=_set("custom_convert_samples_to_train_data_path"),
        why="with --custom-convert-samples-to-train-data-path, which does that",
    ),
    Inert(
        flags=("kl_coef", "gamma", "lambd", "normalize_advantages"),
        when=_set("custom_advantage_function_path"),
        why="with --custom-advantage-function-path, which does that",
    ),
    Inert(
        flags=("eval_interval",),
        when=_set("debug_train_only"),
        why="with --debug-train-only, which starts no engine",
    ),
    Inert(
        flags=("save", "save_hf", "save_debug_train_data", "profile_target"),
        when=_set("debug_rollout_only"),
        why="with --debug-rollout-only, which starts no trainer",
    ),
)  # fmt: skip


def warn_inert(draft: Draft) -> None:
    for needed, names in _NEEDED.items():
        for name in names:
            if draft.given(name) and not draft[needed]:
                draft.warn(f"{option_of(name)} has no effect without {option_of(needed)}")
    for rule in _RULES:
        for name in rule.flags:
            if draft.given(name) and rule.when(draft):
                draft.warn(f"{option_of(name)} has no effect {rule.why}")
