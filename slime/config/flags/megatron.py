"""Megatron's flags: the fields of megatron-core's configs, and spellings of Megatron's own parser.

megatron-core on PyPI has no argument parser, so options that differ from a field's name are listed here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime.config.flags.spec import Flag, Kind, is_set, option_of
from slime.config.flags.train import MUON


def megatron_flags(fields: list[Flag]) -> list[Flag]:
    """Return the fields of megatron-core's configs as they are spelled, and flags without a field."""
    group = fields[0].group
    return [_respell(flag) for flag in fields] + [
        Flag(
            name=name,
            kind=kind,
            options=(option_of(name),),
            off_options=(option_of(f"no_{name}"),) if kind == "bool" else (),
            help=help,
            group=group,
            family="megatron",
            **more,
        )
        for name, kind, help, more in _WITHOUT_FIELD
    ]


def _respell(flag: Flag) -> Flag:
    options, off_options = _SPELLINGS.get(flag.name, ((), ()))
    return replace(
        flag,
        options=options + flag.options,
        off_options=off_options + flag.off_options,
        **_CHANGES.get(flag.name, {}),
    )


# field -> options that set it, options that turn it off; messages use the first
_SPELLINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "num_moe_experts": (("--num-experts",), ()),
    "grad_reduce_in_fp32": (("--accumulate-allreduce-grads-in-fp32",), ()),
    "apply_rope_fusion": ((), ("--no-rope-fusion",)),
    "muon_split_qkv": ((), ("--muon-no-split-qkv",)),
    "num_layers_in_first_pipeline_stage": (("--decoder-first-pipeline-num-layers",), ()),
    "num_layers_in_last_pipeline_stage": (("--decoder-last-pipeline-num-layers",), ()),
}

_AT_LEAST_ONE = {"min": 1}
_CPU_OFFLOAD = is_set("optimizer_cpu_offload")
_RECOMPUTE = is_set("recompute_granularity")

# Names, defaults, choices, bounds and conditions that differ from the table of megatron-core's fields.
# A pattern such as [0]*3+[1]*89 is text that the Megatron backend reads.
_CHANGES: dict[str, dict[str, Any]] = {
    "num_moe_experts": {"name": "num_experts"},
    "grad_reduce_in_fp32": {"name": "accumulate_allreduce_grads_in_fp32"},
    "moe_layer_freq": {"kind": "str", "many": False, "default": "1"},
    "use_distributed_optimizer": {"default": True},
    "main_grads_dtype": {"default": "fp32", "choices": ("fp32", "bf16")},
    "main_params_dtype": {"default": "fp32", "choices": ("fp32", "fp16")},
    "exp_avg_dtype": {"default": "fp32", "choices": ("fp32", "fp16", "bf16", "fp8")},
    "exp_avg_sq_dtype": {"default": "fp32", "choices": ("fp32", "fp16", "bf16", "fp8")},
    "muon_tp_mode": {"choices": ("blockwise", "duplicated", "distributed"), "needs": MUON},
    "muon_fp32_matmul_prec": {"choices": ("medium", "high", "highest"), "needs": MUON},
    "muon_split_qkv": {"needs": MUON},
    "optimizer_offload_fraction": {"min": 0, "max": 1, "needs": _CPU_OFFLOAD},
    "overlap_cpu_optimizer_d2h_h2d": {"needs": _CPU_OFFLOAD},
    "recompute_method": {"needs": _RECOMPUTE},
    "recompute_num_layers": {"needs": _RECOMPUTE},
    "tensor_model_parallel_size": _AT_LEAST_ONE,
    "pipeline_model_parallel_size": _AT_LEAST_ONE,
    "context_parallel_size": _AT_LEAST_ONE,
    "expert_model_parallel_size": _AT_LEAST_ONE,
    "expert_tensor_parallel_size": _AT_LEAST_ONE,
}

_WITHOUT_FIELD: list[tuple[str, Kind, str, dict[str, Any]]] = [
    (
        "swiglu",
        "bool",
        "Gated linear units with SiLU as activation.",
        {"sets": ("TransformerConfig.gated_linear_unit", "TransformerConfig.activation_func")},
    ),
    (
        "group_query_attention",
        "bool",
        "Grouped queries; --num-query-groups gives their number.",
        {"sets": ("TransformerConfig.num_query_groups",)},
    ),
    (
        "use_rotary_position_embeddings",
        "bool",
        "The same as --position-embedding-type rope.",
        {},
    ),
    (
        "position_embedding_type",
        "str",
        "Type of position embedding.",
        {
            "default": "learned_absolute",
            "choices": ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
        },
    ),
    ("use_rope_scaling", "bool", "Scale rotary frequencies as Llama 3.1 does.", {}),
    ("rope_scaling_factor", "float", "Factor of --use-rope-scaling.", {"default": 8.0}),
    (
        "untie_embeddings_and_output_weights",
        "bool",
        "Do not share the weights of embedding and output layer.",
        {},
    ),
    ("vocab_size", "int", "Size of the vocabulary before padding.", {}),
    (
        "make_vocab_size_divisible_by",
        "int",
        "Pad the vocabulary to a multiple of this.",
        {"default": 128},
    ),
    ("max_position_embeddings", "int", "Maximum sequence length of the model.", {}),
    ("seq_length", "int", "Maximum sequence length in training.", {}),
    (
        "post_self_attn_layernorm",
        "bool",
        "Add a norm after the attention, before the residual is added.",
        {},
    ),
    ("post_mlp_layernorm", "bool", "Add a norm after the MLP, before the residual is added.", {}),
    (
        "num_layers_per_virtual_pipeline_stage",
        "int",
        "Layers of one virtual pipeline stage.",
        {"sets": ("TransformerConfig.virtual_pipeline_model_parallel_size",)},
    ),
    (
        "num_virtual_stages_per_pipeline_rank",
        "int",
        "Virtual stages of each pipeline rank.",
        {"sets": ("TransformerConfig.virtual_pipeline_model_parallel_size",)},
    ),
    (
        "ckpt_format",
        "str",
        "Format of Megatron checkpoints.",
        {"default": "torch_dist", "choices": ("torch_dist",)},
    ),
    ("lr_warmup_init", "float", "Learning rate at the start of the warm-up.", {"default": 0.0}),
    ("lr_wsd_decay_iters", "int", "Steps of the last phase of --lr-decay-style WSD.", {}),
    (
        "lr_wsd_decay_style",
        "str",
        "Shape of that phase.",
        {
            "default": "exponential",
            "choices": ("exponential", "linear", "cosine", "minus_sqrt"),
        },
    ),
    ("start_weight_decay", "float", "Weight decay at the start.", {}),
    ("end_weight_decay", "float", "Weight decay at the end.", {}),
    (
        "weight_decay_incr_style",
        "str",
        "How the weight decay changes between the two.",
        {"default": "constant", "choices": ("constant", "linear", "cosine")},
    ),
]
