"""What is refused before anything starts, each with one sentence that says what to type."""

from __future__ import annotations

from slime.utils.errors import ConfigError
from slime.utils.flags.derive import split_slice
from slime.utils.flags.draft import Draft
from slime.utils.flags.embedded import embedded_support
from slime.utils.flags.registry import all_flags, own_flags
from slime.utils.flags.spec import option_of

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
    "eval_interval",
    "n_samples_per_eval_prompt",
    "eval_max_response_len",
    "save_interval",
    "save_total_limit",
    "overlong_buffer_len",
)
_AT_LEAST_ZERO = (
    "rollout_num_gpus",
    "start_rollout_id",
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
    "tis_clip_low",
    "eval_temperature",
    "rollout_health_check_first_wait",
)


def check_values(draft: Draft) -> None:
    """Rules about single values and about what must be given; they run before values are derived."""
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            if draft[name] is not None and draft[name] < least:
                raise ConfigError(f"{option_of(name)} must be at least {least}, not {draft[name]}")
    if draft["rollout_temperature"] <= 0:
        raise ConfigError(
            f"--rollout-temperature must be above 0, not {draft['rollout_temperature']}: training needs "
            "samples, not the likeliest token; --eval-temperature 0 makes evaluations greedy"
        )
    if draft["hf_checkpoint"] is None:
        raise ConfigError("--hf-checkpoint is missing: give the folder of the model")
    if draft["rollout_batch_size"] is None:
        raise ConfigError("--rollout-batch-size is missing: give the number of prompts per rollout")
    if draft["bf16"] and draft["fp32"]:
        raise ConfigError("--bf16 and --fp32 exclude each other: leave one out")
    _check_run_length(draft)


def _check_run_length(draft: Draft) -> None:
    rollouts, epochs = draft["num_rollout"], draft["num_epoch"]
    if rollouts is None and epochs is None:
        raise ConfigError("how long to train is missing: give --num-rollout or --num-epoch")
    if rollouts is not None and epochs is not None:
        raise ConfigError("--num-rollout and --num-epoch exclude each other: leave one out")


def check_all(draft: Draft) -> None:
    """Rules that need the derived values too."""
    check_backend(draft)
    check_engine(draft)
    check_algorithm(draft)
    check_batches(draft)
    check_lengths(draft)
    check_files(draft)


def check_backend(draft: Draft) -> None:
    """A flag that only the other trainer honours, set explicitly, is refused."""
    backend = draft["train_backend"]
    for name in draft.origins:
        flag = all_flags().get(name)
        if flag is None or not draft.given(name):
            continue
        owner = "megatron" if flag.family == "megatron" else flag.backend
        if owner is not None and owner != backend:
            raise ConfigError(
                f"{flag.option} belongs to --train-backend {owner}, but this run uses {backend}: "
                "leave it out"
            )


def check_engine(draft: Draft) -> None:
    if draft["rollout_engine"] != "slime":
        return
    for name in draft.origins:
        if name.startswith("sglang_") and draft.given(name) and name not in own_flags():
            support = embedded_support(name.removeprefix("sglang_"))
            if support == "refused" and draft[name] != all_flags()[name].default:
                raise ConfigError(
                    f"{option_of(name)} is not supported by the embedded engine: leave it out, or use "
                    "--rollout-engine sglang"
                )
    if draft["rollout_num_gpus_per_engine"] > 1:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {draft['rollout_num_gpus_per_engine']}: the embedded engine "
            "has no tensor parallelism: use 1, or --rollout-engine sglang"
        )


def check_algorithm(draft: Draft) -> None:
    if draft["kl_coef"] and draft["kl_loss_coef"]:
        raise ConfigError(
            "--kl-coef (KL in the rewards) and --kl-loss-coef (KL in the loss) exclude each other: set "
            "one of them to 0"
        )
    if draft["eps_clip_c"] is not None and draft["eps_clip_c"] <= 1:
        raise ConfigError(f"--eps-clip-c must be above 1, not {draft['eps_clip_c']}")


def check_batches(draft: Draft) -> None:
    prompts, siblings = draft["rollout_batch_size"], draft["n_samples_per_prompt"]
    batch, steps = draft["global_batch_size"], draft["num_steps_per_rollout"]
    if prompts * siblings != batch * steps:
        raise ConfigError(
            f"--rollout-batch-size {prompts} x --n-samples-per-prompt {siblings} = {prompts * siblings} "
            f"samples do not make --num-steps-per-rollout {steps} x --global-batch-size {batch} = "
            f"{batch * steps}: choose numbers with equal products"
        )
    if draft["use_dynamic_batch_size"] and draft["max_tokens_per_gpu"] is None:
        raise ConfigError(
            "--use-dynamic-batch-size needs a token budget: give --max-tokens-per-gpu"
        )
    if draft["over_sampling_batch_size"] < prompts:
        raise ConfigError(
            f"--over-sampling-batch-size {draft['over_sampling_batch_size']} is below "
            f"--rollout-batch-size {prompts}: raise it to at least that"
        )


def check_lengths(draft: Draft) -> None:
    context, prompt = draft["rollout_max_context_len"], draft["rollout_max_prompt_len"]
    if context is not None and context <= (prompt or 1):
        raise ConfigError(
            f"--rollout-max-context-len {context} leaves no response token behind a prompt of "
            f"{prompt or 1}: raise it, or lower --rollout-max-prompt-len"
        )


def check_files(draft: Draft) -> None:
    draft.need_file(draft["hf_checkpoint"], "--hf-checkpoint")
    for spec in draft["prompt_data"] or []:
        if not spec.startswith("reasoning-gym:"):
            draft.need_file(split_slice(spec)[0], "--prompt-data")
