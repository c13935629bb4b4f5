"""All flags by name and by option: slime's own, and those of Megatron, SGLang and the router.

The tables are JSON files, so that parsing needs none of these packages. `tools/read_flag_tables.py`
writes them; each names the versions it was read from. megatron-core on PyPI has no argument parser,
so options of Megatron's own parser that differ from a field's name are listed at the end.
"""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slime.config.env import looks_secret
from slime.config.flags import algorithm, rollout, run, train
from slime.config.flags.spec import Flag, flag, flags_of, is_set
from slime.config.flags.train import MUON
from slime.utils.printable import HIDDEN, hide_in_address, hide_secrets

Table = Literal["megatron", "sglang", "router"]
_TUPLES = ("options", "off_options", "choices", "versions", "sets")
_SECRET = re.compile(
    r"(api_keys?|admin_api_key|password|secret|watermark_key\w*|db_url|redis_url)$"
)
_ADDRESS_FLAG = re.compile(r"(url|host|addr|endpoint)s?$")


class OwnFlags(
    run.Mode,
    run.Cluster,
    train.Model,
    train.Lora,
    rollout.Rollout,
    rollout.Data,
    rollout.Reward,
    rollout.Eval,
    train.Batches,
    algorithm.Algorithm,
    train.Optimizer,
    train.Checkpoint,
    run.Weights,
    run.FaultTolerance,
    run.Tracking,
    run.Checks,
    algorithm.Sft,
):
    """Every group of flags that slime declares itself, in the order of the documentation."""


@cache
def own_flags() -> dict[str, Flag]:
    return {flag.name: flag for group in OwnFlags.__bases__ for flag in flags_of(group)}


@cache
def foreign_flags() -> dict[str, Flag]:
    """Return the flags of Megatron, SGLang and its router that slime does not declare itself."""
    flags = [
        *megatron_flags(table_flags("megatron", "Megatron-core")),
        *table_flags("sglang", "SGLang"),  # every option of a server, with the prefix --sglang-
        *table_flags("router", "sglang-router"),  # the router's, with the prefix --router-
    ]
    return {flag.name: flag for flag in flags if flag.name not in own_flags()}


@cache
def all_flags() -> dict[str, Flag]:
    return {**own_flags(), **foreign_flags()}


@cache
def options() -> dict[str, Flag]:
    """Return every option string with its flag."""
    return {o: f for f in all_flags().values() for o in (*f.options, *f.off_options)}


def read_table(name: Table) -> dict[str, Any]:
    """Return {"package": ..., "versions": [...], "flags": [row, ...]}."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())


def table_flags(name: Table, title: str) -> list[Flag]:
    table = read_table(name)
    group = f"{title} {', '.join(table['versions'])}"
    return [_flag(row, family=name, group=group) for row in table["flags"]]


def redact(name: str, value: Any) -> Any:
    """Return the value without secrets: of secret flags, in dictionaries and in addresses."""
    flag = own_flags().get(name) or all_flags().get(name)
    secret = looks_secret(name) if flag is None else flag.secret
    if secret and value is not None:
        return HIDDEN
    if _ADDRESS_FLAG.search(name) and isinstance(value, str) and "://" not in value:
        return hide_in_address(value)
    return _redact_inside(value)


def _flag(row: dict[str, Any], **common: Any) -> Flag:
    values = {key: tuple(value) if key in _TUPLES else value for key, value in row.items()}
    return Flag(**values, **common, secret=bool(_SECRET.search(row["name"])))


def _redact_inside(value: Any) -> Any:
    if isinstance(value, str):
        return hide_secrets(value)
    if isinstance(value, list):
        return [_redact_inside(item) for item in value]
    if isinstance(value, dict):
        return {
            key: HIDDEN if looks_secret(str(key)) else _redact_inside(item)
            for key, item in value.items()
        }
    return value


def megatron_flags(fields: list[Flag]) -> list[Flag]:
    """Return the fields of megatron-core's configs as they are spelled, and flags without a field."""
    group = fields[0].group
    others = [replace(f, family="megatron", group=group) for f in flags_of(_WithoutField)]
    return [_respell(flag) for flag in (*fields, *others)]


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
    "grad_reduce_in_fp32": (("--accumulate-allreduce-grads-in-fp32",), ("--grad-reduce-in-bf16",)),
    "check_for_nan_in_grad": ((), ("--no-check-for-nan-in-loss-and-grad",)),
    "add_position_embedding": ((), ("--no-position-embedding",)),
    "apply_rope_fusion": ((), ("--no-rope-fusion",)),
    "muon_split_qkv": ((), ("--muon-no-split-qkv",)),
    "num_layers_in_first_pipeline_stage": (("--decoder-first-pipeline-num-layers",), ()),
    "num_layers_in_last_pipeline_stage": (("--decoder-last-pipeline-num-layers",), ()),
}

_AT_LEAST_ONE = {"min": 1}
_VIRTUAL_STAGES = ("TransformerConfig.virtual_pipeline_model_parallel_size",)
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
    "swiglu": {
        "sets": ("TransformerConfig.gated_linear_unit", "TransformerConfig.activation_func")
    },
    "group_query_attention": {"sets": ("TransformerConfig.num_query_groups",)},
    "num_layers_per_virtual_pipeline_stage": {"sets": _VIRTUAL_STAGES},
    "num_virtual_stages_per_pipeline_rank": {"sets": _VIRTUAL_STAGES},
}


@dataclass(kw_only=True)
class _WithoutField:
    """Flags of Megatron's parser that are no field of a config."""

    swiglu: bool = flag(None, "Gated linear units with SiLU as activation.")
    group_query_attention: bool = flag(
        None, "Grouped queries; --num-query-groups gives their number."
    )
    use_rotary_position_embeddings: bool = flag(None, "The same as --position-embedding-type rope.")
    position_embedding_type: Literal[
        "learned_absolute", "rope", "mrope", "yarn", "relative", "none"
    ] = flag("learned_absolute", "Type of position embedding.")
    add_position_embedding: bool = flag(False, "Add learned absolute positions to the embeddings.")
    spec: list[str] = flag(
        None,
        "Module and function of a layer spec, such as slime_plugins.models.glm4 get_glm_spec. The layers "
        "are built from config.json: accepted for a model of the same family.",
    )
    use_rope_scaling: bool = flag(None, "Scale rotary frequencies as Llama 3.1 does.")
    rope_scaling_factor: float = flag(8.0, "Factor of --use-rope-scaling.")
    untie_embeddings_and_output_weights: bool = flag(
        None, "Do not share the weights of embedding and output layer."
    )
    vocab_size: int = flag(None, "Size of the vocabulary before padding.")
    make_vocab_size_divisible_by: int = flag(128, "Pad the vocabulary to a multiple of this.")
    max_position_embeddings: int = flag(None, "Maximum sequence length of the model.")
    seq_length: int = flag(None, "Maximum sequence length in training.")
    post_self_attn_layernorm: bool = flag(
        None, "Add a norm after the attention, before the residual is added."
    )
    post_mlp_layernorm: bool = flag(None, "Add a norm after the MLP, before the residual is added.")
    num_layers_per_virtual_pipeline_stage: int = flag(None, "Layers of one virtual pipeline stage.")
    num_virtual_stages_per_pipeline_rank: int = flag(None, "Virtual stages of each pipeline rank.")
    ckpt_format: Literal["torch_dist"] = flag("torch_dist", "Format of Megatron checkpoints.")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_iters: int = flag(None, "Steps of the last phase of --lr-decay-style WSD.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "Shape of that phase."
    )
    start_weight_decay: float = flag(None, "Weight decay at the start.")
    end_weight_decay: float = flag(None, "Weight decay at the end.")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "How the weight decay changes between the two."
    )
