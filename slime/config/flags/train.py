"""Flags of the model, its optimizer, its checkpoints and the algorithm."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags.spec import flag


@dataclass(kw_only=True)
class Model:
    """Model and memory."""

    hf_checkpoint: str = flag(
        None, "folder with the model in Hugging Face format: config, tokenizer, first weights"
    )
    model_name: str | None = flag(
        None,
        "name of the model in the default --run-dir; the weights' names follow from config.json",
        backend="megatron",
    )
    bf16: bool = flag(False, "train in bfloat16 (master weights fp32); the default on a GPU")
    fp32: bool = flag(False, "train in float32; the default without a GPU")
    custom_model_provider_path: str | None = flag(
        None,
        "fn(pre_process, post_process, vp_stage=None) that builds the model",
        backend="megatron",
    )
    log_probs_chunk_size: int = flag(1024, "tokens whose logits exist at a time")
    recompute_loss_function: bool = flag(
        False, "compute the loss again in the backward pass instead of keeping its activations"
    )
    only_train_params_name_list: list[str] | None = flag(
        None, "regular expressions; only parameters whose HF name matches one are trained"
    )
    freeze_params_name_list: list[str] | None = flag(
        None, "regular expressions; parameters whose HF name matches one are not trained"
    )
    qkv_format: Literal["thd", "bshd"] = flag("thd", "packed sequences (thd) or padded ones (bshd)")
    custom_megatron_init_path: str | None = flag(
        None, "fn(args), called once Megatron is initialised", backend="megatron"
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "fn(args, model, store_prefix), called before each log-prob pass", backend="megatron"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before a step",
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
        "attention of the HF model; default: slime_packed, which takes packed sequences, or sdpa for "
        "padded ones (--qkv-format bshd)",
        backend="fsdp",
    )


@dataclass(kw_only=True)
class Optimizer:
    """Optimizer."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag(
        "adam",
        "optimizer: adam (AdamW), sgd, or muon for the hidden weight matrices with adam for embeddings, "
        "head, norms and biases; dist_muon spreads muon's state over data-parallel ranks (megatron)",
    )
    lr: float = flag(1e-6, "learning rate")
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "how the learning rate decays after the warm-up"
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up")
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a fraction of --lr-decay-iters, instead of --lr-warmup-iters"
    )
    lr_decay_iters: int = flag(
        None, "optimizer steps the decay takes; default: all steps of the run"
    )
    weight_decay: float = flag(0.01, "weight decay; norms and biases have none")
    adam_beta1: float = flag(0.9, "decay of the mean of gradients")
    adam_beta2: float = flag(0.999, "decay of the mean of squared gradients")
    adam_eps: float = flag(1e-8, "added to the denominator")
    sgd_momentum: float = flag(0.9, "momentum of sgd, whose weight decay is part of the gradient")
    muon_momentum: float = flag(0.95, "decay of muon's mean of gradients")
    muon_use_nesterov: bool = flag(False, "Nesterov momentum in muon")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz iterations of muon")
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = flag(
        "spectral",
        "factor of muon's update of an R x C matrix: sqrt(max(R, C)), sqrt(max(1, R/C)) or sqrt(R/C)",
    )
    muon_extra_scale_factor: float = flag(
        1.0, "a further factor of muon's update; 0.2 with spectral matches the size of Adam's"
    )
    clip_grad: float = flag(1.0, "largest gradient norm; 0 turns clipping off")


@dataclass(kw_only=True)
class Checkpoint:
    """Checkpoint."""

    ref_load: str | None = flag(
        None, "checkpoint of the reference model; the actor starts from it when --load is empty"
    )
    load: str | None = flag(None, "checkpoint folder to continue from; empty or absent: start anew")
    ckpt_step: int | None = flag(None, "checkpoint to load from --load; default: the latest")
    save: str | None = flag(None, "folder for checkpoints")
    save_interval: int | None = flag(
        None,
        "rollouts between two checkpoints; with --save alone one is written at the end, and on SIGTERM, "
        "SIGHUP or Ctrl-C after the rollout under way",
    )
    save_total_limit: int | None = flag(
        None, "keep the newest N checkpoints and delete older ones; the only one is never deleted"
    )
    async_save: bool = flag(False, "write checkpoints while training goes on")
    no_save_optim: bool = flag(
        False, "leave the optimizer state out of checkpoints; a resume then starts it anew"
    )
    save_hf: str | None = flag(
        None,
        "also write the model in Hugging Face format here, with the last checkpoint; with '{rollout_id}' "
        "in the name, which is replaced by the number, with each",
    )
    seed: int = flag(1234, "seed of the trainer")


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
    ] = flag("grpo", "how rewards become advantages")
    eps_clip: float = flag(0.2, "the probability ratio is clipped below at 1 - this")
    eps_clip_high: float = flag(None, "and above at 1 + this; default: --eps-clip")
    eps_clip_c: float | None = flag(
        None, "dual clip: with a negative advantage the loss is at most this times it; above 1"
    )
    value_clip: float = flag(0.2, "clip range of the value loss (ppo)")
    kl_coef: float = flag(0.0, "KL to the reference model, taken off the rewards")
    use_kl_loss: bool = flag(False, "load the reference model and add its KL to the loss")
    kl_loss_coef: float = flag(0.0, "weight of that KL in the loss; 0 only logs it")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag("k1", "estimator of the KL")
    use_unbiased_kl: bool = flag(
        False, "weight the KL by the importance ratio, which makes its gradient unbiased off-policy"
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    gamma: float = flag(1.0, "discount (ppo, reinforce_plus_plus)")
    lambd: float = flag(1.0, "lambda of generalised advantage estimation (ppo)")
    normalize_advantages: bool = flag(
        False, "bring advantages to mean 0 and deviation 1 over the whole batch"
    )
    disable_grpo_std_normalization: bool = flag(
        False, "subtract the group's mean only (Dr. GRPO, with --calculate-per-token-loss)"
    )
    disable_rewards_normalization: bool = flag(False, "use rewards as they are")
    calculate_per_token_loss: bool = flag(
        False, "average the loss over tokens instead of over samples"
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag("policy_loss", "loss")
    custom_loss_function_path: str | None = flag(
        None, "fn(args, batch, logits, sum_of_sample_mean) -> (loss, log_dict), with custom_loss"
    )
    custom_advantage_function_path: str | None = flag(
        None, "fn(args, rollout_data) that sets advantages and returns"
    )
    use_tis: bool = flag(
        False, "truncated importance sampling between the engine's log-probs and the trainer's"
    )
    tis_clip: float = flag(2.0, "largest weight")
    tis_clip_low: float = flag(0.0, "smallest weight")
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token", "weight per token, per sequence (product) or per sequence (geometric mean)"
    )
    tis_mode: Literal["truncate", "mask"] = flag(
        "truncate", "outside the range: use its edge, or drop the token"
    )
    custom_tis_function_path: str | None = flag(
        None, "fn(...) -> (pg_loss, masks, metrics) in place of the built-in correction"
    )
    overlong_buffer_len: int | None = flag(
        None, "soft overlong punishment (DAPO): it grows over this many last tokens"
    )
    overlong_penalty_factor: float = flag(1.0, "and reaches this at the longest response")
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer of the "
        "policy loss",
    )
    use_rollout_logprobs: bool = flag(
        False, "take the engine's log-probs as the old ones instead of computing them again"
    )
    get_mismatch_metrics: bool = flag(
        False, "log the gap between engine and trainer log-probs token by token"
    )
    num_critic_only_steps: int = flag(0, "rollouts that train the critic alone, at the start (ppo)")
    critic_load: str | None = flag(
        None,
        "where the critic starts: a folder of checkpoints, or a Hugging Face folder (its value head "
        "then starts at 0); default: as the actor. A resumed run takes the critic out of --load",
    )
    critic_save: str | None = flag(
        None, "folder for the critic's checkpoints; default: inside those of --save"
    )
    critic_lr: float | None = flag(None, "learning rate of the critic; default: --lr")
    ref_update_interval: int | None = flag(
        None, "rollouts after which the reference model becomes a copy of the actor"
    )
    use_routing_replay: bool = flag(
        False, "train with the expert choices of the log-prob pass", backend="megatron"
    )
    use_rollout_routing_replay: bool = flag(
        False, "train with the expert choices the engine made", backend="megatron"
    )
    use_opd: bool = flag(False, "on-policy distillation from a teacher")
    opd_type: Literal["sglang", "megatron"] | None = flag(
        None,
        "where the teacher runs: in an engine at --rm-url (sglang), or in the trainer (megatron; with "
        "--train-backend fsdp too)",
    )
    opd_kl_coef: float = flag(1.0, "weight of the KL to the teacher")
    opd_teacher_load: str | None = flag(
        None,
        "the teacher in the trainer: a Hugging Face folder or one of our checkpoints, of the same "
        "architecture; with --train-backend fsdp a Hugging Face folder of another one with the same "
        "vocabulary too",
    )


@dataclass(kw_only=True)
class Sft:
    """Supervised fine-tuning."""

    loss_mask_type: Literal["qwen", "qwen3", "distill_qwen"] = flag(
        "qwen", "chat format that tells which tokens of a conversation are trained on"
    )
