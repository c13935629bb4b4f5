"""Rules about single values, and about what must be given at all."""

from __future__ import annotations

from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of
from slime.config.phase_timeouts import phase_timeouts
from slime.core.errors import ConfigError

_AT_LEAST_ONE = (
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "rollout_num_gpus_per_engine",
    "num_gpus_per_node",
    "distributed_timeout_minutes",
    "update_weight_buffer_size",
    "update_weights_interval",
    "log_probs_chunk_size",
    "rollout_max_response_len",
    "rollout_max_prompt_len",
    "sglang_server_concurrency",
    "num_rollout",
    "num_epoch",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "num_steps_per_rollout",
    "micro_batch_size",
    "max_tokens_per_gpu",
    "log_probs_max_tokens_per_gpu",
    "lr_decay_iters",
    "eval_interval",
    "n_samples_per_eval_prompt",
    "eval_max_response_len",
    "save_interval",
    "save_total_limit",
    "overlong_buffer_len",
    "muon_num_ns_steps",
    "ref_update_interval",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_AT_LEAST_ZERO = (
    "rollout_num_gpus",
    "start_rollout_id",
    "ckpt_step",
    "lr",
    "min_lr",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "adam_eps",
    "kl_coef",
    "kl_loss_coef",
    "eps_clip",
    "eps_clip_high",
    "tis_clip",
    "tis_clip_low",
    "overlong_penalty_factor",
    "eval_temperature",
    "num_critic_only_steps",
    "critic_lr",
    "opd_kl_coef",
    "rollout_health_check_first_wait",
)
_ABOVE_ZERO = (
    "rollout_health_check_interval",
    "rollout_health_check_timeout",
    "rollout_no_engine_timeout",
    "value_clip",
    "muon_extra_scale_factor",
)
_FRACTIONS = (
    "gamma",
    "lambd",
    "lr_warmup_fraction",
    "adam_beta1",
    "adam_beta2",
    "sgd_momentum",
    "muon_momentum",
    "eps_clip",
    "optimizer_offload_fraction",
)


def check_values(draft: Draft) -> None:
    """They run before values are derived, so that deriving may count on them."""
    _check_ranges(draft)
    _check_sampling(draft)
    if draft["hf_checkpoint"] is None:
        raise ConfigError("--hf-checkpoint is missing: give the folder of the model")
    if draft["rollout_batch_size"] is None:
        raise ConfigError("--rollout-batch-size is missing: give the number of prompts per rollout")
    if draft["num_rollout"] is None and draft["num_epoch"] is None:
        raise ConfigError("how long to train is missing: give --num-rollout or --num-epoch")
    if draft["num_rollout"] is not None and draft["num_epoch"] is not None:
        raise ConfigError("--num-rollout and --num-epoch are mutually exclusive: remove one")
    if draft["bf16"] and draft["fp32"]:
        raise ConfigError("--bf16 and --fp32 are mutually exclusive: remove one")
    for name in ("train_env_vars", "apply_chat_template_kwargs", "phase_timeout_minutes"):
        if not isinstance(draft[name], dict):
            raise ConfigError(f"""{option_of(name)} must be a JSON object, as in '{{"name": 1}}'""")
    phase_timeouts(draft["phase_timeout_minutes"])
    for key, value in draft["train_env_vars"].items():
        if not isinstance(value, str):
            raise ConfigError(
                f"--train-env-vars: the value of {key} must be text: put it in quotes"
            )


def _check_ranges(draft: Draft) -> None:
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            if draft[name] is not None and draft[name] < least:
                raise ConfigError(f"{option_of(name)} must be at least {least}, not {draft[name]}")
    for name in _ABOVE_ZERO:
        if draft[name] <= 0:
            raise ConfigError(f"{option_of(name)} must be above 0, not {draft[name]}")
    for name in _FRACTIONS:
        if draft[name] is not None and not 0 <= draft[name] <= 1:
            raise ConfigError(f"{option_of(name)} must be between 0 and 1, not {draft[name]}")


def _check_sampling(draft: Draft) -> None:
    if draft["rollout_temperature"] <= 0:
        raise ConfigError(
            f"--rollout-temperature must be above 0, not {draft['rollout_temperature']}: training needs "
            "samples, not the likeliest token; --eval-temperature 0 makes evaluations greedy"
        )
    for name in ("rollout_top_p", "eval_top_p"):
        if draft[name] is not None and not 0 < draft[name] <= 1:
            raise ConfigError(f"{option_of(name)} must be above 0 and at most 1, not {draft[name]}")
    for name in ("rollout_top_k", "eval_top_k"):
        if draft[name] is not None and draft[name] != -1 and draft[name] < 1:
            raise ConfigError(
                f"{option_of(name)} must be -1 (all) or at least 1, not {draft[name]}"
            )
