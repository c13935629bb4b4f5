"""Flags of the model, its optimizer, its checkpoints and the algorithm."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags.run import NO_TRAINER
from slime.config.flags.spec import equals, flag, is_set

MUON = equals("optimizer", "muon", "dist_muon")
_SGD = equals("optimizer", "sgd")
_PPO = equals("advantage_estimator", "ppo")
_KL = is_set("use_kl_loss") | is_set("kl_coef")
_SFT = equals("loss_type", "sft_loss")
_OWN_ADVANTAGES = is_set("custom_advantage_function_path", note="which does that")
_OWN_REWARDS = is_set("custom_reward_post_process_path", note="which does that")
_OWN_CONVERSION = is_set("custom_convert_samples_to_train_data_path", note="which does that")


@dataclass(kw_only=True)
class Model:
    """Model and memory."""

    hf_checkpoint: str = flag(
        None,
        "folder of the model in Hugging Face format: config, tokenizer, initial weights",
        required="the folder of the model",
    )
    model_name: str | None = flag(
        None,
        "name of the model in the default --run-dir; parameter names follow from config.json",
        backend="megatron",
    )
    bf16: bool = flag(
        False, "train in bfloat16 (master weights fp32); the default on a GPU", excludes="fp32"
    )
    fp32: bool = flag(False, "train in float32; the default without a GPU")
    custom_model_provider_path: str | None = flag(
        None,
        "fn(pre_process, post_process, vp_stage=None) that builds the model",
        backend="megatron",
    )
    log_probs_chunk_size: int = flag(1024, "tokens whose logits are computed at a time", min=1)
    recompute_loss_function: bool = flag(
        False, "recompute the loss in the backward pass instead of keeping its activations"
    )
    only_train_params_name_list: list[str] | None = flag(
        None, "regular expressions; only parameters whose HF name matches one are trained"
    )
    freeze_params_name_list: list[str] | None = flag(
        None, "regular expressions; parameters whose HF name matches one are not trained"
    )
    qkv_format: Literal["thd", "bshd"] = flag("thd", "packed sequences (thd) or padded ones (bshd)")
    custom_megatron_init_path: str | None = flag(
        None, "fn(args), called after Megatron is initialised", backend="megatron"
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "fn(args, model, store_prefix), called before each log-prob pass", backend="megatron"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before each "
        "step",
        backend="megatron",
    )
    fsdp_cpu_offload: bool = flag(
        False, "keep parameters, gradients and optimizer state in host memory", backend="fsdp"
    )
    gradient_checkpointing: bool = flag(
        False, "recompute activations in the backward pass", backend="fsdp"
    )
    attn_implementation: (
        Literal[
            "slime_packed",
            "sdpa",
            "eager",
            "flash_attention_2",
            "flash_attention_3",
            "flash_attention_4",
        ]
        | None
    ) = flag(
        None,
        "attention of the HF model; default: slime_packed, which handles packed sequences, or "
        "sdpa for padded ones (--qkv-format bshd)",
        backend="fsdp",
    )


@dataclass(kw_only=True)
class Optimizer:
    """Optimizer."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag(
        "adam",
        "adam (AdamW), sgd, or muon for the hidden weight matrices with adam for embeddings, "
        "head, norms and biases; dist_muon shards muon's state over data-parallel ranks (megatron)",
    )
    lr: float = flag(1e-6, "learning rate", min=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", min=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "how the learning rate decays after the warm-up"
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", min=0)
    lr_warmup_fraction: float | None = flag(
        None,
        "warm-up as a fraction of --lr-decay-iters, instead of --lr-warmup-iters",
        min=0,
        max=1,
        excludes="lr_warmup_iters",
    )
    lr_decay_iters: int = flag(
        None, "optimizer steps of the decay; default: all steps of the run", min=1
    )
    weight_decay: float = flag(0.01, "weight decay; not applied to norms and biases", min=0)
    adam_beta1: float = flag(0.9, "decay rate of the first moment", min=0, max=1, unless=_SGD)
    adam_beta2: float = flag(0.999, "decay rate of the second moment", min=0, max=1, unless=_SGD)
    adam_eps: float = flag(1e-8, "term added to the denominator", min=0, unless=_SGD)
    sgd_momentum: float = flag(
        0.9,
        "momentum; weight decay is added to the gradient (not decoupled)",
        min=0,
        max=1,
        needs=_SGD,
    )
    muon_momentum: float = flag(0.95, "momentum of muon", min=0, max=1, needs=MUON)
    muon_use_nesterov: bool = flag(False, "Nesterov momentum in muon", needs=MUON)
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations", min=1, needs=MUON)
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = flag(
        "spectral",
        "factor of the update of an R x C matrix: sqrt(max(R, C)), sqrt(max(1, R/C)) or sqrt(R/C)",
        needs=MUON,
    )
    muon_extra_scale_factor: float = flag(
        1.0,
        "additional factor of the update; 0.2 with spectral matches the size of Adam's updates",
        above=0,
        needs=MUON,
    )
    clip_grad: float = flag(1.0, "maximum gradient norm; 0 turns clipping off", min=0)


@dataclass(kw_only=True)
class Checkpoint:
    """Checkpoint."""

    ref_load: str | None = flag(
        None,
        "checkpoint of the reference model; the actor starts from it when --load is empty or "
        "absent",
    )
    load: str | None = flag(
        None, "checkpoint folder to resume from; a new run starts where it is empty or absent"
    )
    ckpt_step: int | None = flag(
        None, "number of the checkpoint to load from --load; default: the latest", min=0
    )
    save: str | None = flag(None, "folder for checkpoints", unless=NO_TRAINER)
    save_interval: int | None = flag(
        None,
        "rollouts between two checkpoints; default: only after the last rollout. SIGTERM, SIGHUP "
        "and Ctrl-C save too: a running training step is finished first, a running generation or "
        "evaluation is dropped",
        min=1,
    )
    save_total_limit: int | None = flag(
        None,
        "keep the newest N checkpoints and delete older ones; the only one is never deleted",
        min=1,
        needs="save",
    )
    async_save: bool = flag(
        False, "write checkpoints in the background while training continues", needs="save"
    )
    no_save_optim: bool = flag(
        False,
        "do not save the optimizer state; a resumed run starts with a fresh one",
        needs="save",
    )
    save_hf: str | None = flag(
        None,
        "folder for the model in Hugging Face format, written with the last checkpoint; with "
        "'{rollout_id}' in the name, which is replaced by the rollout's number, one is written "
        "with every checkpoint",
        unless=NO_TRAINER,
    )
    seed: int = flag(1234, "random seed of the trainer")


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
        "dual clip: with a negative advantage the loss is at most this times its size",
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
        0.0, "coefficient of the KL of --use-kl-loss; with 0 it is only logged", min=0
    )
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "estimator of the KL; low_var_kl is k3", needs=_KL
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
        "the "
        "policy loss",
        unless=_SFT,
    )
    use_rollout_logprobs: bool = flag(
        False,
        "use the engine's log-probs as old log-probs instead of recomputing them in the trainer",
        unless=_SFT,
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
        None, "folder for the critic's checkpoints; default: inside those of --save", needs=_PPO
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
        False, "MoE: train with the experts that the engine chose", backend="megatron"
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


@dataclass(kw_only=True)
class Sft:
    """Supervised fine-tuning."""

    loss_mask_type: Literal["qwen", "qwen3", "distill_qwen"] = flag(
        "qwen", "chat format, by which the trained tokens of a conversation are found"
    )
