"""Megatron's flags that are refused or have no effect, with the reason.

A Megatron flag in none of these tables is honoured: it reaches a configuration class of
megatron-core, is read by slime, or is compared with config.json of --hf-checkpoint.
tests/unit/test_every_flag.py checks this for every flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.checks.precision_checks import FUSIONS, has_local_layers
from slime.config.flags.draft import Draft
from slime.config.flags.registry import all_flags
from slime.config.installed import is_installed
from slime.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why these flags are refused, or why they have no effect."""

    why: str
    flags: tuple[str, ...]


# Values that request what slime does anyway, although megatron-core has another default.
WITHOUT_EFFECT: dict[str, Any] = {"attention_dropout": 0.0, "transformer_impl": "local"}

# Refused at any other value than megatron-core's default.
REFUSED: tuple[Reason, ...] = (
    Reason(
        why="gradients are reduced by megatron-core's DistributedDataParallel here, not by its FSDP; "
        "use --train-backend fsdp",
        flags=(
            "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy", "gradient_reduce_div_fusion",
            "suggested_communication_unit_size", "preserve_fp32_weights",
            "keep_fp8_transpose_cache", "fsdp_double_buffer", "fsdp_manual_registration",
            "init_model_with_meta_device",
        ),
    ),
    Reason(
        why="the Megatron backend trains none of the models that have it",
        flags=(
            "dsa_indexer_n_heads", "dsa_indexer_head_dim",
            "dsa_indexer_topk", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss",
            "is_hybrid_model", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
            "mamba_num_heads", "use_mamba_mem_eff_path", "mrope_section", "moe_latent_size",
            "heterogeneous_block_specs", "apply_residual_connection_post_layernorm",
            "qk_l2_norm", "no_rope_freq", "use_fused_weighted_squared_relu",
        ),
    ),
    Reason(
        why="multi-token-prediction layers are on the last pipeline stage",
        flags=("mtp_standalone",),
    ),
    Reason(
        why="packed micro-batches differ in length, and a CUDA graph has one",
        flags=(
            "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope",
            "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph",
            "cuda_graph_warmup_steps",
        ),
    ),
    Reason(
        why="it is an option of Megatron's inference, and engines generate here",
        flags=(
            "flash_decode", "inference_rng_tracker", "inference_sampling_seed",
            "inference_fuse_tp_communication", "use_inference_optimized_layers",
            "symmetric_ar_type", "mlp_chunks_for_prefill", "cache_mla_latents",
        ),
    ),
    Reason(
        why="its kernels come from a package (nvidia-kitchen) whose layers slime does not build",
        flags=("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
    ),
    Reason(
        why="TransformerEngine's communication buffers have one size, and packed micro-batches differ "
        "in length",
        flags=(
            "tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag",
            "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag",
            "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs",
            "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1",
            "tp_comm_bootstrap_backend",
        ),
    ),
    Reason(
        why="no model that is trained has learned positions",
        flags=("add_position_embedding",),
    ),
    Reason(
        why="the precision is chosen with --bf16 or --fp32",
        flags=("fp16", "params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
    ),
    Reason(
        why="losses are scaled for fp16 only, and training is in bf16 or fp32",
        flags=(
            "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
        ),
    ),
    Reason(
        why="weights are loaded, synchronized, checksummed, saved and offloaded as bf16 tensors; "
        "matmuls are in FP8 without it",
        flags=(
            "fp8_param", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "fp4_param_gather",
        ),
    ),
    Reason(
        why="TransformerEngine ignores it since 1.8",
        flags=("fp8_interval",),
    ),
    Reason(
        why="attention is computed in bf16",
        flags=("fp8_dot_product_attention", "fp8_multi_head_attention"),
    ),
    Reason(
        why="micro-batches are padded for the FP8 recipes delayed, tensorwise, blockwise and mxfp8",
        flags=("fp8_quantizer_factory", "fp4_format", "fp4_recipe", "fp4_quantizer_factory"),
    ),
    Reason(
        why="all parameters follow one schedule, that of --lr and --min-lr",
        flags=("decoupled_lr", "decoupled_min_lr"),
    ),
    Reason(
        why="the weight decay is --weight-decay throughout",
        flags=("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    ),
    Reason(
        why="the schedules are constant, linear, cosine and inverse-square-root, with warm-up from "
        "near 0",
        flags=("lr_warmup_init", "lr_wsd_decay_iters", "lr_wsd_decay_style"),
    ),
    Reason(
        why="Adam's weight decay is decoupled (AdamW); --weight-decay 0 turns it off",
        flags=("decoupled_weight_decay",),
    ),
    Reason(
        why="packed attention has no dropout",
        flags=("attention_dropout",),
    ),
    Reason(
        why="packed attention scales by --softmax-scale or the size of a head only",
        flags=("apply_query_key_layer_scaling",),
    ),
    Reason(
        why="attention logits are neither recorded nor clipped",
        flags=("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
    ),
    Reason(
        why="slime sets it: packed micro-batches differ in length and pipelines exchange their lengths",
        flags=(
            "variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm",
            "deallocate_pipeline_outputs",
        ),
    ),
    Reason(
        why="forward and backward passes of different micro-batches are not interleaved",
        flags=(
            "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
            "ep_overlap_early_attn_memory_release",
        ),
    ),
    Reason(
        why="log-probs are computed from hidden states in chunks, without Megatron's output layer",
        flags=("defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    ),
    Reason(
        why="--recompute-granularity applies to every micro-batch",
        flags=("num_microbatches_with_partial_activation_checkpoints",),
    ),
    Reason(
        why="context parallelism is over one group, over which every sample is split",
        flags=(
            "hierarchical_context_parallel_sizes", "hybrid_context_parallel",
            "max_seqlen_per_dp_cp_rank",
        ),
    ),
    Reason(
        why="pipeline ranks talk over --distributed-backend",
        flags=("pipeline_model_parallel_comm_backend",),
    ),
    Reason(
        why="the distributed optimizer has one instance, over all data-parallel ranks",
        flags=("num_distributed_optimizer_instances", "overlap_param_gather_with_optimizer_step"),
    ),
    Reason(
        why="repeating expert choices is --use-routing-replay or --use-rollout-routing-replay",
        flags=("moe_enable_routing_replay",),
    ),
    Reason(
        why="megatron-core 0.16.1 does nothing with it",
        flags=(
            "moe_extended_tp", "moe_token_dropping", "moe_per_layer_logging",
            "moe_router_topk_limited_devices", "moe_use_legacy_grouped_gemm",
        ),
    ),
    Reason(
        why="gradients are not counted; train/grad_norm is logged",
        flags=("log_num_zeros_in_grad",),
    ),
    Reason(
        why="slime does not set it; torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction "
        "stays as torch has it",
        flags=("disable_bf16_reduced_precision_matmul",),
    ),
    Reason(
        why="its kernels are never enabled; engines have --sglang-enable-deterministic-inference",
        flags=("batch_invariant_mode",),
    ),
    Reason(
        why="random state is kept by megatron-core's own tracker",
        flags=("te_rng_tracker",),
    ),
)  # fmt: skip

# Refused if TransformerEngine is not installed; otherwise passed to its layers.
NEEDS_TE: tuple[str, ...] = (
    "transformer_impl", "fp8_format", "fp8_recipe", "fp8_margin", "fp8_amax_history_len",
    "fp8_amax_compute_algo", "fp8_wgrad", "tp_only_amax_red", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "activation_func_fp8_input_store", "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8", "use_te_activation_func", "disable_parameter_transpose_cache",
    "apply_rope_fusion", "fused_single_qkv_rope", "cpu_offloading", "cpu_offloading_num_layers",
    "cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering",
    "fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size",
)  # fmt: skip

HARMLESS: tuple[Reason, ...] = (
    Reason(why="a kernel of TransformerEngine's; torch computes the same", flags=FUSIONS),
    Reason(
        why="log-probs are computed in chunks from hidden states, without Megatron's loss; a warning "
        "says so",
        flags=("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    ),
    Reason(
        why="auto, local and flash are FlashAttention in any case; fused and unfused are checked",
        flags=("attention_backend",),
    ),
    Reason(
        why="weights come from --hf-checkpoint or a checkpoint, never from an initialisation",
        flags=(
            "perform_initialization", "use_cpu_initialization", "init_method_std",
            "embedding_init_method_std",
        ),
    ),
    Reason(
        why="chooses between kernels of one operation; the result is the same",
        flags=(
            "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion",
            "persist_layer_norm", "memory_efficient_layer_norm",
        ),
    ),
    Reason(
        why="experts are computed by grouped GEMMs, with TransformerEngine or without",
        flags=("moe_grouped_gemm",),
    ),
    Reason(
        why="how context-parallel ranks exchange keys and values; the result is the same",
        flags=("cp_comm_type",),
    ),
    Reason(why="attention sums in fp32 anyway", flags=("attention_softmax_in_fp32",)),
    Reason(
        why="always asynchronous in megatron-core 0.16.1",
        flags=("async_tensor_model_parallel_allreduce",),
    ),
    Reason(why="Megatron's timers are not used", flags=("barrier_with_L1_time",)),
    Reason(
        why="every layer is saved under its own name anyway",
        flags=("hetereogenous_dist_checkpoint",),
    ),
    Reason(why="torch_dist is the only format", flags=("ckpt_format",)),
    Reason(
        why="micro-batches are as long as their samples, which --rollout-max-context-len and "
        "--max-tokens-per-gpu bound",
        flags=("seq_length", "max_position_embeddings"),
    ),
    Reason(
        why="the layers are built from config.json; the spec of another family of models is refused",
        flags=("spec",),
    ),
    Reason(
        why="--num-query-groups, which is compared with config.json, implies it",
        flags=("group_query_attention",),
    ),
)  # fmt: skip


def check_megatron_flags(draft: Draft) -> None:
    """Raise ConfigError for a flag that was set to a value that is not honoured."""
    refused = {name: reason.why for reason in REFUSED for name in reason.flags}
    for name in draft.given_names():
        if not asks_for_something(name, draft[name]):
            continue
        option = all_flags()[name].option
        if name in refused:
            raise ConfigError(f"{option} is not honoured: {refused[name]}: remove it")
        if name in NEEDS_TE and not is_installed("transformer_engine"):
            draft.lacking(
                f"{option} needs TransformerEngine, which is not installed: remove it, or install "
                "transformer-engine"
            )
        if name in NEEDS_TE and name != "transformer_impl" and has_local_layers(draft):
            raise ConfigError(
                f"{option} reaches TransformerEngine's layers only: add --transformer-impl "
                "transformer_engine, or remove it"
            )
    if draft["transformer_impl"] == "inference_optimized":
        raise ConfigError(
            "--transformer-impl inference_optimized cannot be trained: remove it, or use local or "
            "transformer_engine"
        )


def asks_for_something(name: str, value: Any) -> bool:
    """Return whether a Megatron flag at this value differs from not setting it."""
    if name in WITHOUT_EFFECT:
        return value != WITHOUT_EFFECT[name]
    default = all_flags()[name].default
    if not value and default is None:
        return False
    return value != default
