"""Flags of the model, its batches, its optimizer and its checkpoints."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from slime.config.flags.run import NO_TRAINER
from slime.config.flags.spec import equals, flag, is_set

MUON = equals("optimizer", "muon", "dist_muon")
_SGD = equals("optimizer", "sgd")
_LORA = is_set("lora_rank", note="give the rank of the adapters")
_megatron_flag = partial(flag, backend="megatron")
_lora_flag = partial(flag, requires=_LORA)


@dataclass(kw_only=True)
class Model:
    """Model and memory."""

    hf_checkpoint: str = flag(
        None,
        "folder of the model in Hugging Face format: config, tokenizer, initial weights; or its id on the Hub, "
        "such as Qwen/Qwen3-0.6B",
        required="the folder of the model",
    )
    model_name: str | None = _megatron_flag(
        None, "name of the model in the default --run-dir; parameter names follow from config.json"
    )
    bf16: bool = flag(
        False, "train in bfloat16 (master weights fp32); the default on a GPU", excludes="fp32"
    )
    fp32: bool = flag(False, "train in float32; the default without a GPU")
    custom_model_provider_path: str | None = _megatron_flag(
        None, "fn(pre_process, post_process, vp_stage=None) that builds the model"
    )
    enable_mtp_training: bool = _megatron_flag(
        False,
        "train the model's multi-token-prediction (MTP) layers on the responses; only they learn "
        "from it",
        requires=is_set("mtp_num_layers", note="give the number of MTP layers to train"),
    )
    log_probs_chunk_size: int = flag(
        1024,
        "tokens whose logits are computed at a time; -1: all of a micro-batch",
        min=1,
        special=-1,
    )
    recompute_loss_function: bool = flag(
        False, "recompute the loss in the backward pass instead of keeping its activations"
    )
    only_train_params_name_list: list[str] | None = flag(
        None,
        "regular expressions; only parameters whose HF or Megatron name matches one are trained",
    )
    freeze_params_name_list: list[str] | None = flag(
        None,
        "regular expressions; parameters whose HF or Megatron name matches one are not trained",
    )
    freeze_vision_tower: bool = flag(
        True,
        "do not train the vision tower of a model that takes images; --no-freeze-vision-tower trains it",
        needs="multimodal_keys",
    )
    qkv_format: Literal["thd", "bshd"] = flag("thd", "packed sequences (thd) or padded ones (bshd)")
    data_pad_size_multiplier: int | None = _megatron_flag(
        None,
        "pad packed micro-batches to a multiple of this many tokens times the tensor parallel size; fewer "
        "different sizes fragment the memory less",
        min=1,
        unless=equals("qkv_format", "bshd", note="whose rows have the length of the longest"),
    )
    megatron_config_path: str | None = flag(
        None,
        "YAML file with flags for the actor, the critic or the reference only, such as critic: {lr: 1.0e-5}",
    )
    custom_megatron_init_path: str | None = _megatron_flag(
        None, "fn(args), called after Megatron is initialised"
    )
    custom_megatron_before_log_prob_hook_path: str | None = _megatron_flag(
        None, "fn(args, model, store_prefix), called before each log-prob pass"
    )
    custom_megatron_before_train_step_hook_path: str | None = _megatron_flag(
        None,
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before each "
        "step",
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
class Lora:
    """LoRA adapters."""

    lora_rank: int | None = flag(
        None,
        "train low-rank adapters of this rank (r of PEFT) and keep the base weights frozen; the "
        "reference model of a KL term is then the base without a second copy",
        min=1,
    )
    lora_alpha: float = _lora_flag(8.0, "adapters are scaled by alpha / rank", above=0)
    lora_dropout: float = _lora_flag(
        0.0, "dropout of the adapters' input in the training pass", min=0, max=0.99
    )
    lora_target_modules: list[str] = _lora_flag(
        ["all-linear"],
        "names, or ends of names, of the linear modules with adapters; all-linear: all but the LM head; "
        "experts, or gate_up_proj and down_proj of them: the experts of MoE layers",
    )
    lora_experts_shared_outer: bool = _lora_flag(
        False,
        "the experts of a layer share lora_A of gate_up_proj and lora_B of down_proj (SGLang's shared "
        "outer LoRA); the other matrices are per expert",
    )
    lora_use_rslora: bool = _lora_flag(False, "scale adapters by alpha / sqrt(rank) (rsLoRA)")
    lora_adapter_path: str | None = flag(
        None,
        "PEFT folder to start from; rank, alpha and modules come from its adapter_config.json",
    )
    lora_merge_for_rollout: bool = _lora_flag(
        False, "send engines the weights with the adapters merged in, instead of the adapter alone"
    )


@dataclass(kw_only=True)
class Batches:
    """Length of the training and batches."""

    num_rollout: int = flag(
        None,
        "number of rollouts; or give --num-epoch; 0 with --debug-rollout-only: evaluate only",
        min=0,
    )
    num_epoch: int | None = flag(None, "passes over the data; --num-rollout overrides it", min=1)
    start_rollout_id: int | None = flag(
        None,
        "number of the first rollout; default: the one after the loaded checkpoint's, else 0",
        min=0,
    )
    global_batch_size: int = flag(
        None,
        "samples per optimizer step (trajectories, if an agent returns several samples of one); "
        "rollout-batch-size x n-samples-per-prompt = global-batch-size x num-steps-per-rollout",
        min=1,
    )
    num_steps_per_rollout: int = flag(None, "optimizer steps per rollout", min=1)
    micro_batch_size: int = flag(
        1, "samples per forward pass; turns the default --use-dynamic-batch-size off", min=1
    )
    ref_micro_batch_size: int | None = flag(
        None,
        "",
        ignored="passes without gradients have the size of --micro-batch-size or "
        "--log-probs-max-tokens-per-gpu",
    )
    balance_data: bool = flag(
        False, "distribute samples over ranks so that their token counts are balanced"
    )
    use_dynamic_batch_size: bool = flag(
        False,
        "fill each micro-batch up to --max-tokens-per-gpu; does not change the loss. Default: on, unless "
        "--micro-batch-size or --qkv-format bshd is given",
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        "tokens per GPU and micro-batch; with context parallelism every rank of the group adds "
        "this many. A longer sample is a micro-batch of its own. Default: 4096",
        min=1,
        needs="use_dynamic_batch_size",
    )
    log_probs_max_tokens_per_gpu: int = flag(
        None,
        "the same for passes without gradients; default: --max-tokens-per-gpu",
        min=1,
        needs="use_dynamic_batch_size",
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
        "checkpoint of the reference model; the actor starts from it if --load is empty or missing",
    )
    ref_ckpt_step: int | None = flag(
        None,
        "number of the checkpoint to load from --ref-load; default: the latest",
        min=0,
        requires=is_set("ref_load", note="give the folder of the checkpoints"),
    )
    load: str | None = flag(
        None, "checkpoint folder to resume from; if it is empty or missing, a new run starts"
    )
    ckpt_step: int | None = flag(
        None,
        "number of the checkpoint to load from --load; default: the latest",
        min=0,
        requires=is_set("load", note="give the folder of the checkpoints"),
    )
    no_load_optim: bool = flag(
        False, "resume from --load with a fresh optimizer state", needs="load"
    )
    save: str | None = flag(None, "folder for checkpoints", unless=NO_TRAINER)
    save_interval: int | None = flag(
        None,
        "rollouts between two checkpoints; default: only after the last rollout. SIGTERM, SIGHUP "
        "and Ctrl-C save too: a running training step is finished first, a running generation or "
        "evaluation is aborted",
        min=1,
        requires=is_set("save", note="give the folder for checkpoints"),
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
