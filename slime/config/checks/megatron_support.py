"""Megatron's flags that are refused or have no effect, with the reason.

A Megatron flag in none of these tables is honoured: it reaches a configuration class of
megatron-core, is read by slime, or is compared with config.json of --hf-checkpoint.
tests/unit/test_every_flag.py checks this for every flag.
"""

from __future__ import annotations

from typing import Any

from slime.config.checks.precision_checks import FUSIONS, has_local_layers
from slime.config.flags.draft import Draft
from slime.config.flags.registry import all_flags
from slime.config.installed import is_installed
from slime.core.errors import ConfigError


def _by_flag(reasons: dict[str, str]) -> dict[str, str]:
    """Return the reason for each flag, of a table of the flags for each reason."""
    return {flag: why for why, flags in reasons.items() for flag in flags.split()}


# Values that request what slime does anyway, although megatron-core has another default.
WITHOUT_EFFECT: dict[str, Any] = {"attention_dropout": 0.0, "transformer_impl": "local"}

# Refused at any other value than megatron-core's default.
REFUSED = _by_flag(
    {
        "gradients are reduced by megatron-core's DistributedDataParallel here, not by its FSDP; "
        "use --train-backend fsdp":
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy "
            "outer_dp_sharding_strategy gradient_reduce_div_fusion "
            "suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache "
            "fsdp_double_buffer fsdp_manual_registration init_model_with_meta_device",
        "the Megatron backend trains none of the models that have it":
            "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff "
            "dsa_indexer_use_sparse_loss is_hybrid_model mamba_state_dim mamba_head_dim "
            "mamba_num_groups mamba_num_heads use_mamba_mem_eff_path mrope_section moe_latent_size "
            "heterogeneous_block_specs apply_residual_connection_post_layernorm qk_l2_norm "
            "no_rope_freq use_fused_weighted_squared_relu",
        "multi-token-prediction layers are on the last pipeline stage": "mtp_standalone",
        "packed micro-batches differ in length, and a CUDA graph has one":
            "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope "
            "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph "
            "cuda_graph_warmup_steps",
        "it is an option of Megatron's inference, and engines generate here":
            "flash_decode inference_rng_tracker inference_sampling_seed "
            "inference_fuse_tp_communication use_inference_optimized_layers symmetric_ar_type "
            "mlp_chunks_for_prefill cache_mla_latents",
        "its kernels come from a package (nvidia-kitchen) whose layers slime does not build":
            "use_kitchen use_kitchen_attention kitchen_attention_backend",
        "TransformerEngine's communication buffers have one size, and packed micro-batches differ "
        "in length":
            "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
            "tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag "
            "tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv "
            "tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
        "no model that is trained has learned positions": "add_position_embedding",
        "the precision is chosen with --bf16 or --fp32":
            "fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
        "losses are scaled for fp16 only, and training is in bf16 or fp32":
            "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "weights are loaded, synchronized, checksummed, saved and offloaded as bf16 tensors; "
        "matmuls are in FP8 without it":
            "fp8_param fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag fp4_param_gather",
        "TransformerEngine ignores it since 1.8": "fp8_interval",
        "attention is computed in bf16": "fp8_dot_product_attention fp8_multi_head_attention",
        "micro-batches are padded for the FP8 recipes delayed, tensorwise, blockwise and mxfp8":
            "fp8_quantizer_factory fp4_format fp4_recipe fp4_quantizer_factory",
        "all parameters follow one schedule, that of --lr and --min-lr":
            "decoupled_lr decoupled_min_lr",
        "the weight decay is --weight-decay throughout":
            "start_weight_decay end_weight_decay weight_decay_incr_style",
        "the schedules are constant, linear, cosine and inverse-square-root, with warm-up from "
        "near 0":
            "lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_style",
        "Adam's weight decay is decoupled (AdamW); --weight-decay 0 turns it off":
            "decoupled_weight_decay",
        "packed attention has no dropout": "attention_dropout",
        "packed attention scales by --softmax-scale or the size of a head only":
            "apply_query_key_layer_scaling",
        "attention logits are neither recorded nor clipped":
            "qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit",
        "slime sets it: packed micro-batches differ in length and pipelines exchange their "
        "lengths":
            "variable_seq_lengths overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs",
        "forward and backward passes of different micro-batches are not interleaved":
            "overlap_moe_expert_parallel_comm delay_wgrad_compute "
            "ep_overlap_early_attn_memory_release",
        "log-probs are computed from hidden states in chunks, without Megatron's output layer":
            "defer_embedding_wgrad_compute wgrad_deferral_limit",
        "--recompute-granularity applies to every micro-batch":
            "num_microbatches_with_partial_activation_checkpoints",
        "context parallelism is over one group, over which every sample is split":
            "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank",
        "pipeline ranks talk over --distributed-backend": "pipeline_model_parallel_comm_backend",
        "the distributed optimizer has one instance, over all data-parallel ranks":
            "num_distributed_optimizer_instances overlap_param_gather_with_optimizer_step",
        "repeating expert choices is --use-routing-replay or --use-rollout-routing-replay":
            "moe_enable_routing_replay",
        "megatron-core 0.16.1 does nothing with it":
            "moe_extended_tp moe_token_dropping moe_per_layer_logging "
            "moe_router_topk_limited_devices moe_use_legacy_grouped_gemm",
        "gradients are not counted; train/grad_norm is logged": "log_num_zeros_in_grad",
        "slime does not set it; torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction "
        "stays as torch has it":
            "disable_bf16_reduced_precision_matmul",
        "its kernels are never enabled; engines have --sglang-enable-deterministic-inference":
            "batch_invariant_mode",
        "random state is kept by megatron-core's own tracker": "te_rng_tracker",
    }
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

HARMLESS = _by_flag(
    {
        "a kernel of TransformerEngine's; torch computes the same": " ".join(FUSIONS),
        "log-probs are computed in chunks from hidden states, without Megatron's loss; a warning "
        "says so":
            "cross_entropy_loss_fusion cross_entropy_fusion_impl",
        "auto and local are slime's packed attention in any case; the others are checked":
            "attention_backend",
        "weights come from --hf-checkpoint or a checkpoint, never from an initialisation":
            "perform_initialization use_cpu_initialization init_method_std "
            "embedding_init_method_std",
        "chooses between kernels of one operation; the result is the same":
            "masked_softmax_fusion bias_activation_fusion bias_dropout_fusion persist_layer_norm "
            "memory_efficient_layer_norm",
        "experts are computed by grouped GEMMs, with TransformerEngine or without":
            "moe_grouped_gemm",
        "how context-parallel ranks exchange keys and values; the result is the same":
            "cp_comm_type",
        "attention sums in fp32 anyway": "attention_softmax_in_fp32",
        "always asynchronous in megatron-core 0.16.1": "async_tensor_model_parallel_allreduce",
        "Megatron's timers are not used": "barrier_with_L1_time",
        "every layer is saved under its own name anyway": "hetereogenous_dist_checkpoint",
        "torch_dist is the only format": "ckpt_format",
        "micro-batches are as long as their samples, which --rollout-max-context-len and "
        "--max-tokens-per-gpu bound":
            "seq_length max_position_embeddings",
        "the layers are built from config.json; the spec of another family of models is refused":
            "spec",
        "--num-query-groups, which is compared with config.json, implies it":
            "group_query_attention",
    }
)  # fmt: skip


def check_megatron_flags(draft: Draft) -> None:
    """Raise ConfigError for a flag that was set to a value that is not honoured."""
    for flag in draft.given_flags():
        name, option = flag.name, flag.option
        if not asks_for_something(name, draft[name]):
            continue
        if name in REFUSED:
            raise ConfigError(f"{option} is not honoured: {REFUSED[name]}: remove it")
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
