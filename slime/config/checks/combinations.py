"""Rules about combinations of flags; each error says what to type instead."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext

from slime.config.checks.engine_checks import check_engine
from slime.config.checks.layout_checks import check_cluster
from slime.config.derive import context_limit
from slime.config.engine_groups import named
from slime.config.flags.draft import (
    Draft,
    check_own_flag,
    check_requirements,
    warn_without_effect,
)
from slime.config.flags.registry import all_flags, own_flags
from slime.config.flags.spec import option_of
from slime.config.flags.train import MUON
from slime.config.lora import adapted_experts, check_lora
from slime.config.reward_types import check_grading, reward_type
from slime.core.errors import ConfigError

_FSDP_TOO = ("expert_model_parallel_size",)  # flags of Megatron that FSDP honours too
# flag of the other trainer -> what to use instead of it
_INSTEAD = {
    "recompute_granularity": "use --gradient-checkpointing",
    "optimizer_cpu_offload": "use --fsdp-cpu-offload",
    "attention_backend": "use --attn-implementation",
    "gradient_checkpointing": "use --recompute-granularity full",
    "fsdp_cpu_offload": "use --optimizer-cpu-offload",
    "attn_implementation": "use --attention-backend",
}


def check_all(draft: Draft) -> None:
    """Check all combinations. Runs after values are derived."""
    check_backend(draft)
    check_engine(draft)
    check_cluster(draft)
    check_algorithm(draft)
    check_distillation(draft)
    check_lora(draft)
    check_megatron_adapters(draft)
    check_optimizer(draft)
    check_optimizer_kind(draft)
    check_critic(draft)
    check_reward(draft)
    check_batches(draft)
    check_lengths(draft)
    check_modes(draft)
    check_requirements(draft)
    check_patterns(draft)
    warn_single_sample_groups(draft)
    warn_without_effect(draft)


def check_backend(draft: Draft) -> None:
    """Raise ConfigError for a flag that only the other trainer honours."""
    backend = draft["train_backend"]
    for flag in draft.given_flags():
        owner = "megatron" if flag.family == "megatron" else flag.backend
        owner = None if flag.name in _FSDP_TOO else owner
        if owner is not None and owner != backend:
            raise ConfigError(
                f"{flag.option} belongs to --train-backend {owner}, this run uses {backend}: "
                f"{_INSTEAD.get(flag.name, 'remove it')}, or choose --train-backend {owner}"
            )
    if draft["lr_decay_style"] == "WSD":
        raise ConfigError(
            "--lr-decay-style WSD is not honoured: use constant, linear, cosine or inverse-square-root"
        )
    if draft["nccl_ub"] and draft["offload_train"]:
        raise ConfigError(
            "--nccl-ub registers the gradients' memory with NCCL, and --offload-train releases that memory "
            "every rollout: remove --nccl-ub, or add --no-offload-train"
        )


def check_algorithm(draft: Draft) -> None:
    if draft["kl_coef"] and draft["kl_loss_coef"] and draft["use_kl_loss"]:
        raise ConfigError(
            "--kl-coef (KL in the rewards) and --kl-loss-coef (KL in the loss) are mutually exclusive: set "
            "one of them to 0"
        )
    if draft["loss_type"] == "policy_loss" and not draft["debug_rollout_only"]:
        for name in ("rollout_top_p", "rollout_top_k"):
            if draft[name] != own_flags()[name].default:
                draft.warn(
                    f"{option_of(name)} {draft[name]}: tokens are sampled from a part of the vocabulary, "
                    "but log-probs are those of all of it: importance ratios are biased"
                )
    later = draft["train_async"] or draft["update_weights_interval"] > 1
    if draft["keep_old_actor"] and later:
        raise ConfigError(
            "--keep-old-actor: the weights are updated before these samples are trained on: use "
            "--use-rollout-logprobs, the log-probs of the weights that generated them"
        )
    needed = draft["loss_type"] == "policy_loss" or draft["advantage_estimator"] == "ppo"
    own = draft["loss_type"] == "sft_loss" or draft["custom_advantage_function_path"]
    if draft["disable_compute_advantages_and_returns"] and needed and not own:
        raise ConfigError(
            "--disable-compute-advantages-and-returns: the policy loss and PPO's critic need them: remove it, "
            "or use --loss-type sft_loss or --custom-advantage-function-path"
        )
    if draft["tis_clip"] < draft["tis_clip_low"]:
        raise ConfigError(
            f"--tis-clip {draft['tis_clip']} is below --tis-clip-low {draft['tis_clip_low']}"
        )
    if draft["use_tis"] and draft["use_rollout_logprobs"] and not draft["custom_tis_function_path"]:
        raise ConfigError(
            "--use-rollout-logprobs takes ratios against the engine's probabilities already: --use-tis "
            "would count the same correction twice: remove one of them"
        )
    if (draft["loss_type"] == "custom_loss") != bool(draft["custom_loss_function_path"]):
        raise ConfigError(
            "--loss-type custom_loss and --custom-loss-function-path belong together: give both or none"
        )


def warn_single_sample_groups(draft: Draft) -> None:
    """Warn if groups of one sample give every advantage 0."""
    elsewhere = (
        "disable_rewards_normalization", "custom_reward_post_process_path", "use_opd",
        "custom_advantage_function_path", "custom_convert_samples_to_train_data_path",
        "custom_generate_function_path", "debug_rollout_only",
    )  # fmt: skip
    compares = draft["advantage_estimator"] not in ("ppo", "reinforce_plus_plus")
    alone = draft["n_samples_per_prompt"] == 1 and draft["loss_type"] == "policy_loss"
    if alone and compares and not any(draft[name] for name in elsewhere):
        draft.warn(
            f"--advantage-estimator {draft['advantage_estimator']} compares the responses to one prompt: "
            "with --n-samples-per-prompt 1 every advantage is 0 and nothing is learned: give 2 or more"
        )


def check_distillation(draft: Draft) -> None:
    """Check the teacher of --use-opd: where it runs, and that --rm-url is used for nothing else."""
    if not draft["use_opd"]:
        return
    served = draft["opd_type"] == "sglang"
    if draft["opd_type"] is None:
        raise ConfigError("--use-opd needs --opd-type: where the teacher runs, sglang or megatron")
    if draft["loss_type"] != "policy_loss":
        raise ConfigError(f"--use-opd needs --loss-type policy_loss, not {draft['loss_type']}")
    if served and not draft["rm_url"]:
        raise ConfigError(
            "--opd-type sglang needs the teacher's address: --rm-url http://HOST:PORT"
        )
    if served and draft["rm_type"] == "remote_rm":
        raise ConfigError(
            "--opd-type sglang and --rm-type remote_rm both use --rm-url: use --opd-type megatron, or "
            "--custom-rm-path"
        )
    if served and draft["group_rm"]:
        raise ConfigError("--opd-type sglang scores single samples: remove --group-rm")
    if served and draft["rollout_temperature"] != 1:
        draft.warn(
            "--opd-type sglang: engines return log-probs at temperature 1, so the policy as sampled at "
            f"--rollout-temperature {draft['rollout_temperature']} learns the teacher at temperature 1; "
            "--opd-type megatron applies the temperature to both"
        )
    if not served and draft["opd_teacher_load"] is None:
        raise ConfigError("--opd-type megatron needs the teacher's folder: --opd-teacher-load")


def check_optimizer(draft: Draft, lr: str = "lr") -> None:
    if draft["min_lr"] > draft[lr]:
        raise ConfigError(f"--min-lr {draft['min_lr']} is above {option_of(lr)} {draft[lr]}")
    iters, decay = draft["lr_warmup_iters"], draft["lr_decay_iters"]
    if draft["lr_decay_style"] != "constant" and decay is not None and iters > decay:
        raise ConfigError(
            f"--lr-warmup-iters {iters} is more than the {decay} steps of the schedule: lower it, or "
            "set --lr-decay-iters"
        )


def check_critic(draft: Draft) -> None:
    """Check the critic's own optimizer flags with the rules for the actor's."""
    own = draft["critic_overrides"]
    if not own:
        return
    view = draft.view()
    view.values.update(own)
    view.origins.update(dict.fromkeys(own, "role file"))
    where = f"{draft['megatron_config_path']}: critic" if draft["megatron_config_path"] else ""
    with named(where) if where else nullcontext():
        for name in own:
            check_own_flag(all_flags()[name], view)
        check_backend(view)
        check_optimizer(view, "lr" if draft["critic_lr"] is None else "critic_lr")
        check_optimizer_kind(view)
    warn_without_effect(view)
    new = [text for text in view.warnings if any(option_of(n) in text for n in own)]
    draft.warnings += [f"{where}: {text}" for text in new if where]


def check_optimizer_kind(draft: Draft) -> None:
    """Refuse flags that SGD or Muon does not support."""
    kind = draft["optimizer"]
    if kind == "adam":
        return
    if draft["train_backend"] == "fsdp":
        if kind == "dist_muon":
            raise ConfigError(
                "--optimizer dist_muon belongs to --train-backend megatron: use muon, whose state FSDP "
                "shards over the ranks"
            )
        if kind == "muon" and draft["fsdp_cpu_offload"]:
            raise ConfigError(
                "--optimizer muon needs matmuls of whole matrices, which --fsdp-cpu-offload would run on the "
                "CPU: remove one of them"
            )
        return
    for name in ("use_distributed_optimizer", "overlap_param_gather", "optimizer_cpu_offload"):
        if draft.given(name) and draft[name]:
            raise ConfigError(
                f"{option_of(name)} is for --optimizer adam, this run uses {kind}: remove it"
            )
    if kind != "sgd" and draft["muon_num_ns_steps"] % 5:
        raise ConfigError(
            f"--muon-num-ns-steps {draft['muon_num_ns_steps']}: megatron-core runs a multiple of 5 "
            "iterations: use 5 or 10"
        )


def check_reward(draft: Draft) -> None:
    rm_type = draft["rm_type"]
    if rm_type is not None:
        reward_type(rm_type)
    for name in draft["allow_row_rm_types"]:
        reward_type(name, "--allow-row-rm-types")
    if rm_type == "remote_rm" and not draft["rm_url"]:
        raise ConfigError("--rm-type remote_rm needs --rm-url with the address to post to")
    _check_grading(draft)


def _check_grading(draft: Draft) -> None:
    """Refuse a grading for which none of the reward types it applies to has a grader."""
    of_run = [name for name in (draft["rm_type"], *draft["allow_row_rm_types"]) if name]
    own = {one.name: one.rm_type for one in draft["eval_datasets"] if one.rm_type}
    for name, rm_type in own.items():
        reward_type(rm_type, f"rm_type of {name}")
    check_grading(draft["rm_grading"], [*of_run, *own.values()], "--rm-grading")
    for one in draft["eval_datasets"]:
        if one.rm_grading is not None:
            names = [one.rm_type] if one.rm_type else of_run
            check_grading(one.rm_grading, names, f"rm_grading of {one.name}:")


def check_batches(draft: Draft) -> None:
    prompts, samples = draft["rollout_batch_size"], draft["n_samples_per_prompt"]
    batch, steps = draft["global_batch_size"], draft["num_steps_per_rollout"]
    if prompts * samples != batch * steps:
        raise ConfigError(
            f"--rollout-batch-size {prompts} x --n-samples-per-prompt {samples} = {prompts * samples} "
            f"samples, but --global-batch-size {batch} x --num-steps-per-rollout {steps} = "
            f"{batch * steps}: choose numbers with equal products"
        )
    if draft["over_sampling_batch_size"] < prompts:
        raise ConfigError(
            f"--over-sampling-batch-size {draft['over_sampling_batch_size']} is below "
            f"--rollout-batch-size {prompts}: raise it to at least that"
        )


def check_lengths(draft: Draft) -> None:
    if draft["rollout_num_gpus"] == 0:  # nothing is generated
        return
    (limit, what), prompt = context_limit(draft), draft["rollout_max_prompt_len"]
    if limit is not None and limit <= (prompt or 1):
        raise ConfigError(
            f"{what} leaves no response token after a prompt of {prompt or 1}: "
            + ("lower --rollout-max-prompt-len" if prompt else "raise it")
        )
    if draft["rollout_max_response_len"] is None:
        raise ConfigError("--rollout-max-response-len is missing: give the longest response")
    response, context = draft["rollout_max_response_len"], draft["rollout_max_context_len"]
    if draft["rollout_engine"] == "slime" and context is None and limit and response >= limit:
        raise ConfigError(
            f"--rollout-max-response-len {response} leaves no room for a prompt in {what}: lower it, or "
            f"add --rollout-max-context-len {limit}, at which responses then end"
        )
    buffer = draft["overlong_buffer_len"]
    if buffer is not None and buffer > draft["rollout_max_response_len"]:
        raise ConfigError(
            f"--overlong-buffer-len {buffer} is more than --rollout-max-response-len "
            f"{draft['rollout_max_response_len']}"
        )


def check_patterns(draft: Draft) -> None:
    """Check path templates ({rollout_id}, {rank}) and regular expressions."""
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in draft[name] or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{option_of(name)} {pattern} is not a regular expression: {error}"
                ) from None
    for name in ("save_hf", "save_debug_rollout_data", "load_debug_rollout_data"):
        _check_pattern(draft, name, {"rollout_id"})
    _check_pattern(draft, "save_debug_train_data", {"rollout_id", "rank"})


def _check_pattern(draft: Draft, name: str, known: set[str]) -> None:
    try:
        (draft[name] or "").format(**dict.fromkeys(known, 0))
    except (LookupError, ValueError, AttributeError):
        words = " and ".join(f"'{{{word}}}'" for word in sorted(known))
        raise ConfigError(
            f"{option_of(name)} {draft[name]}: only {words} can be filled in; double other braces"
        ) from None


def check_megatron_adapters(draft: Draft) -> None:
    """Refuse flags that Megatron does not support with LoRA, or with LoRA on experts."""
    precision_aware = draft["use_precision_aware_optimizer"]
    if draft["lora_rank"] and draft["optimizer_cpu_offload"] and not precision_aware:
        raise ConfigError(
            "--optimizer-cpu-offload with --lora-rank: megatron-core could not load such moments from a "
            "checkpoint: add --use-precision-aware-optimizer"
        )
    named = adapted_experts(draft)
    if not named or draft["train_backend"] != "megatron":
        return
    what = f"with --lora-target-modules {named[0]}"
    if draft["transformer_impl"] == "transformer_engine":
        raise ConfigError(
            f"--transformer-impl transformer_engine {what}: only the experts of slime's own layers have "
            "adapters: use --transformer-impl local"
        )
    if MUON.holds(draft):
        raise ConfigError(
            f"--optimizer {draft['optimizer']} {what}: megatron-core's Muon does not update matrices of "
            "several experts in one parameter: use --optimizer adam"
        )


def check_modes(draft: Draft) -> None:
    if draft["num_rollout"] == 0 and not (draft["debug_rollout_only"] and draft["eval_interval"]):
        raise ConfigError(
            "--num-rollout must be at least 1: 0 evaluates only, with --debug-rollout-only and "
            "--eval-interval (slime eval)"
        )
    custom = draft["eval_function_path"] != own_flags()["rollout_function_path"].default
    if draft["eval_interval"] and not draft["eval_datasets"] and not custom:
        raise ConfigError("--eval-interval needs data: give --eval-prompt-data NAME PATH")
    every, updates = draft["eval_interval"], draft["update_weights_interval"]
    stale = every and every < (draft["num_rollout"] or math.inf) and every % updates
    fresh = ("offload_rollout", "debug_rollout_only", "debug_train_only")  # or no engine at all
    if stale and not any(draft[name] for name in fresh):
        raise ConfigError(
            f"--eval-interval {every}: engines get new weights every {updates} rollouts "
            "(--update-weights-interval) and would be scored with those of an earlier one: use "
            f"--eval-interval {-(-every // updates) * updates}"
        )
    names = [dataset.name for dataset in draft["eval_datasets"]]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--eval-prompt-data: two datasets are named {name}: rename one")
