"""Flags of the algorithm: advantages, loss, corrections, distillation, supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags.spec import equals, flag, is_set

_PPO = equals("advantage_estimator", "ppo")
_KL = is_set("use_kl_loss") | is_set("kl_coef")
_SFT = equals("loss_type", "sft_loss")
_OWN_ADVANTAGES = is_set("custom_advantage_function_path", note="which does that")
_OWN_REWARDS = is_set("custom_reward_post_process_path", note="which does that")
_OWN_CONVERSION = is_set("custom_convert_samples_to_train_data_path", note="which does that")


@dataclass(kw_only=True)
class Algorithm:
    """Algorithm."""

    advantage_estimator: Literal[
        "grpo",
        "gspo",
        "cispo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "ppo",
        "rloo",
    ] = flag("grpo", "how rewards become advantages", unless=_SFT)
    eps_clip: float = flag(
        0.2,
        "lower clip range: the probability ratio is clipped at 1 - this",
        min=0,
        max=1,
        unless=_SFT,
    )
    eps_clip_high: float = flag(
        None,
        "upper clip range: the probability ratio is clipped at 1 + this; default: --eps-clip",
        min=0,
        unless=_SFT,
    )
    eps_clip_c: float | None = flag(
        None,
        "dual clip: if the advantage is negative, the loss is at most this times |advantage|",
        above=1,
        unless=(_SFT, equals("advantage_estimator", "cispo")),
    )
    value_clip: float = flag(0.2, "clip range of the value loss", above=0, needs=_PPO)
    kl_coef: float = flag(
        0.0,
        "coefficient of the KL to the reference model that is subtracted from the rewards",
        min=0,
        unless=(_SFT, _OWN_ADVANTAGES),
    )
    use_kl_loss: bool = flag(
        False, "load the reference model and add its KL to the loss", unless=_SFT
    )
    kl_loss_coef: float = flag(
        0.0,
        "coefficient of the KL of --use-kl-loss; with 0 it is only logged",
        min=0,
        needs="use_kl_loss",
    )
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "estimator of the KL; low_var_kl is k3 clamped to at most 10", needs=_KL
    )
    use_unbiased_kl: bool = flag(
        False,
        "weight the KL by the importance ratio, which makes its gradient unbiased off-policy",
        needs="use_kl_loss",
    )
    entropy_coef: float = flag(0.0, "coefficient of the entropy bonus", unless=_SFT)
    gamma: float = flag(
        1.0,
        "discount factor",
        min=0,
        max=1,
        needs=equals("advantage_estimator", "ppo", "reinforce_plus_plus"),
        unless=_OWN_ADVANTAGES,
    )
    lambd: float = flag(
        1.0,
        "lambda of generalised advantage estimation",
        min=0,
        max=1,
        needs=_PPO,
        unless=_OWN_ADVANTAGES,
    )
    normalize_advantages: bool = flag(
        False,
        "normalise advantages to mean 0 and standard deviation 1 over the whole batch",
        unless=(_SFT, _OWN_ADVANTAGES),
    )
    disable_grpo_std_normalization: bool = flag(
        False,
        "subtract the group's mean without dividing by its standard deviation (Dr. GRPO, together "
        "with --calculate-per-token-loss)",
        needs=equals("advantage_estimator", "grpo", "gspo", "cispo"),
        unless=(_SFT, _OWN_REWARDS),
    )
    disable_rewards_normalization: bool = flag(
        False,
        "use raw rewards, without comparing the samples of a group",
        unless=(_SFT, _OWN_REWARDS),
    )
    calculate_per_token_loss: bool = flag(
        False, "average the loss over the tokens of a step instead of over its trajectories"
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag(
        "policy_loss", "loss function"
    )
    custom_loss_function_path: str | None = flag(
        None,
        "fn(args, batch, logits, sum_of_sample_mean) -> (loss, log_dict), with --loss-type "
        "custom_loss",
    )
    custom_advantage_function_path: str | None = flag(
        None,
        "fn(args, rollout_data) that sets rollout_data.advantages and rollout_data.returns",
        unless=_SFT,
    )
    disable_compute_advantages_and_returns: bool = flag(
        False,
        "do not compute advantages and returns, for custom losses that compute their own and for SFT",
    )
    rollout_data_postprocess_path: str | None = flag(
        None,
        "fn(args, rollout_id, rollout_data), called in the trainer after the advantages are "
        "computed",
    )
    use_tis: bool = flag(
        False,
        "truncated importance sampling: correct for the difference between the engine's log-probs "
        "and the trainer's",
        unless=_SFT,
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", min=0, needs="use_tis")
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight", min=0, needs="use_tis")
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token",
        "importance weight per token, per sequence (product of its tokens') or geometric (their "
        "geometric mean)",
        needs="use_tis",
    )
    tis_mode: Literal["truncate", "mask"] = flag(
        "truncate",
        "for weights outside the bounds: truncate them, or mask the token",
        needs="use_tis",
    )
    custom_tis_function_path: str | None = flag(
        None,
        "fn(...) -> (pg_loss, masks, metrics) that replaces the built-in correction",
        needs="use_tis",
    )
    overlong_buffer_len: int | None = flag(
        None,
        "soft overlong punishment (DAPO): the penalty grows linearly over this many last tokens "
        "before --rollout-max-response-len",
        min=1,
        unless=(_SFT, _OWN_REWARDS, _OWN_CONVERSION),
    )
    overlong_penalty_factor: float = flag(
        1.0, "penalty of a response of the maximum length", min=0, needs="overlong_buffer_len"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer of "
        "the policy loss",
        unless=_SFT,
    )
    use_rollout_logprobs: bool = flag(
        False,
        "use the engine's log-probs as old log-probs instead of recomputing them in the trainer",
        unless=_SFT,
    )
    keep_old_actor: bool = flag(
        False,
        "",
        ignored="the first step's old log-probs are those of the weights that generated the samples",
    )
    get_mismatch_metrics: bool = flag(
        False, "log the difference between the engine's and the trainer's log-probs in detail"
    )
    num_critic_only_steps: int = flag(
        0, "rollouts at the start that train only the critic", min=0, needs=_PPO
    )
    critic_load: str | None = flag(
        None,
        "initial critic: a checkpoint folder, or a Hugging Face folder (its value head then "
        "starts at 0); default: the actor's. A resumed run takes the critic from --load",
        needs=_PPO,
    )
    critic_save: str | None = flag(
        None,
        "folder for the critic's checkpoints; default: inside those of --save",
        needs=_PPO,
        requires=is_set("save", note="give the folder for the actor's checkpoints"),
    )
    critic_lr: float | None = flag(
        None, "learning rate of the critic; default: --lr", min=0, needs=_PPO
    )
    ref_update_interval: int | None = flag(
        None,
        "rollouts after which the reference model is replaced by a copy of the actor",
        min=1,
        needs=_KL,
    )
    use_routing_replay: bool = flag(
        False, "MoE: train with the experts that the log-prob pass chose", backend="megatron"
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "MoE: train with the experts that the engine chose; with --use-routing-replay too, tokens without "
        "routing from the engine use that of the log-prob pass",
        backend="megatron",
    )
    use_opd: bool = flag(False, "on-policy distillation from a teacher model")
    opd_type: Literal["sglang", "megatron"] | None = flag(
        None,
        "where the teacher runs: in an SGLang server at --rm-url (sglang), or in the trainer "
        "(megatron; also with --train-backend fsdp)",
        needs="use_opd",
    )
    opd_kl_coef: float = flag(1.0, "coefficient of the KL to the teacher", min=0, needs="use_opd")
    opd_teacher_load: str | None = flag(
        None,
        "teacher of --opd-type megatron: a Hugging Face folder or a slime checkpoint of the same "
        "architecture; with --train-backend fsdp also a Hugging Face folder of another "
        "architecture with the same vocabulary",
        needs="use_opd",
    )
    opd_teacher_ckpt_step: int | None = flag(
        None,
        "number of the checkpoint to load from --opd-teacher-load; default: the latest",
        min=0,
        needs="opd_teacher_load",
    )


@dataclass(kw_only=True)
class Sft:
    """Supervised fine-tuning."""

    loss_mask_type: Literal["qwen", "qwen3", "distill_qwen"] = flag(
        "qwen", "chat format of conversations, which decides the tokens that are trained"
    )
