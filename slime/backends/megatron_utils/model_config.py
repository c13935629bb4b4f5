"""Build megatron-core's TransformerConfig from a Hugging Face config, parallel sizes and flags.

`--hf-checkpoint` alone is enough. A flag that describes the model is checked against config.json;
any other flag of TransformerConfig is passed on.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig, Qwen2Config

from slime.backends.megatron_utils.architecture import (
    Architecture,
    architecture,
    layer_pattern,
    linear_pattern,
)
from slime.backends.megatron_utils.layers import GptConfig, yarn_mscale
from slime.config.checks.precision_checks import FUSIONS
from slime.config.flags.registry import all_flags
from slime.core.errors import ConfigError
from slime.data.tokenizer import load_hf_config

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)


class MimoConfig(Qwen2Config):
    """Qwen2 with optional QKV biases and MTP layers; transformers has no class for it."""

    model_type = "mimo"


def read_config(folder: str | Path) -> PretrainedConfig:
    """Return the config of the text model in a Hugging Face folder."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    if raw.get("model_type") == "mimo":
        return MimoConfig.from_dict({"attention_bias": True, **raw})
    config = load_hf_config(folder)
    text = config.get_text_config()
    if text is not config:  # beside a vision tower; settings of both may be outside
        text.dtype = text.dtype or config.dtype
        # A default of Qwen3-VL's text config is true; transformers ties by the outer config.
        inner = not config.model_type.startswith("qwen3_vl") and text.tie_word_embeddings
        text.tie_word_embeddings = bool(inner or config.tie_word_embeddings)
    return text


def model_config(hf_config: PretrainedConfig, args: Args) -> TransformerConfig:
    """Return the TransformerConfig; raise ConfigError if a flag disagrees with config.json."""
    model = architecture(hf_config)
    check_flags(model, args)
    _check_expert_biases(model, args)
    fields = config_fields(model, args)
    kind = MLATransformerConfig if model.fields["multi_latent_attention"] else GptConfig
    with refusals_of_megatron():
        return kind(**fields)


@contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Raise ConfigError with one sentence for what megatron-core raises about a flag or the model.

    Missing packages that a flag needs count too; device errors, such as out of memory, pass through.
    """
    try:
        yield
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and type(error) not in (
            RuntimeError,
            NotImplementedError,
        ):  # of the device or of the process group
            raise
        text = " ".join(str(error).split()) or f"{type(error).__name__} in {_place(error)}"
        raise ConfigError(f"megatron-core refuses the model or its layout: {text}") from error


def _place(error: BaseException) -> str:
    """Return the file and line that raised, for assertions without a text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.line})"


def flag_fields(args: Args, config_class: type) -> dict[str, Any]:
    """Return fields that the user or a rule set, without defaults: {"lr": 1e-6, ...}."""
    known = {field.name for field in dataclasses.fields(config_class)}
    fields = {}
    for flag in all_flags().values():
        value = getattr(args, flag.name)
        if not flag.sets or value is None or args.origin(flag.name) == "default":
            continue
        for target in flag.sets:
            owner, field = target.split(".")
            if owner == config_class.__name__ and field in known:
                fields[field] = value
    return fields


def config_fields(model: Architecture, args: Args) -> dict[str, Any]:
    """Return the keyword arguments of the config class; later entries override earlier ones."""
    te = transformer_impl(args) == "transformer_engine"
    fields = {
        **_DEFAULTS,
        **_flag_fields(args),
        **model.fields,
        **_layout(args, model),
        **_precision(args),
        "transformer_impl": "transformer_engine" if te else "local",
        "moe_grouped_gemm": te and model.fields["num_moe_experts"] is not None,
        "mtp_num_layers": trained_mtp_layers(args) or None,
    }
    if not model.fields["multi_latent_attention"]:
        scale = yarn_mscale(model.rope.attention_factor)
        fields |= {"post_norms": model.post_norms, "yarn_mscale": scale}
    return fields


def trained_mtp_layers(args: Args) -> int:
    """Return how many multi-token-prediction layers are built; others are carried over unchanged."""
    return args.mtp_num_layers or 0 if args.enable_mtp_training else 0


def padded_vocab_size(vocab_size: int, args: Args) -> int:
    """Round up to a multiple of TP x --make-vocab-size-divisible-by, for equal tensor shards."""
    given = args.make_vocab_size_divisible_by
    each = all_flags()["make_vocab_size_divisible_by"].default if given is None else given
    multiple = each * args.tensor_model_parallel_size
    return math.ceil(vocab_size / multiple) * multiple


def check_flags(model: Architecture, args: Args) -> None:
    """Raise ConfigError if a flag that the user gave contradicts the model's config."""
    for name, wanted in model_flags(model).items():
        given: Any = getattr(args, name)
        if args.origin(name) not in ("command line", "config") or given is None:
            continue
        if name == "moe_layer_freq":
            given = layer_pattern(given, model.fields["num_layers"])
        if name == "linear_attention_freq" and isinstance(given, list):
            given = linear_pattern(given, model.fields["num_layers"])
        if not _same(given, wanted) and not _means_absent(name, given, model):
            option = all_flags()[name].option
            there = "absent" if wanted is None else wanted
            raise ConfigError(
                f"{option} {given} disagrees with config.json of --hf-checkpoint, where it is "
                f"{there}: remove {option} or correct it"
            )


def model_flags(model: Architecture) -> dict[str, Any]:
    """Return {flag: value} for all of Megatron's flags that describe this model."""
    by_field = {
        target.split(".")[1]: flag.name
        for flag in all_flags().values()
        if flag.family == "megatron"
        for target in flag.sets
        if target.split(".")[0] in ("TransformerConfig", "MLATransformerConfig")
    }
    latent = {f.name for f in all_flags().values() if f.sets[:1] and f.sets[0].startswith("MLA")}
    named = dict.fromkeys(latent)  # absent unless the model has MLA
    named |= {by_field[field]: v for field, v in model.fields.items() if field in by_field}
    named.pop("group_query_attention", None)
    named.pop("swiglu", None)
    fields = model.fields
    return {
        **named,
        "num_query_groups": fields["num_query_groups"],
        "gated_linear_unit": fields["gated_linear_unit"],
        "swiglu": fields["activation_func"] is torch.nn.functional.silu,
        "untie_embeddings_and_output_weights": not model.tied,
        "vocab_size": model.vocab_size,
        "rotary_base": model.rope.base,
        "rotary_percent": model.rope.percent,
        "use_rope_scaling": model.rope.kind == "llama3",
        "rope_scaling_factor": model.rope.factor if model.rope.kind == "llama3" else 8.0,
        "position_embedding_type": _position_embedding(model),
        "use_rotary_position_embeddings": True,
        "experimental_attention_variant": (
            "gated_delta_net" if fields["linear_attention_freq"] is not None else None
        ),
        "post_self_attn_layernorm": model.post_norms,
        "post_mlp_layernorm": model.post_norms,
    }


def transformer_impl(args: Args) -> str:
    """Return the implementation of the layers: TransformerEngine where it can be used.

    In fp32 only if the flag requests it, as its fp32 matmuls use TF32.
    """
    requested = args.transformer_impl
    if requested == "transformer_engine" and (error := te_error()):
        raise ConfigError(
            f"--transformer-impl transformer_engine: it cannot be imported ({error}): remove the "
            "flag, or see `slime doctor`"
        )
    if requested:
        return requested
    return "transformer_engine" if args.precision == "bf16" and has_te() else "local"


def has_te() -> bool:
    """Return whether TransformerEngine can be imported: its extension must match this torch."""
    return te_error() is None


@functools.cache
def te_error() -> str | None:
    if find_spec("transformer_engine") is None:
        return "it is not installed"
    try:
        import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("TransformerEngine is installed but cannot be imported: %s", error)
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _position_embedding(model: Architecture) -> str:
    mla = model.fields["multi_latent_attention"]
    return "yarn" if model.rope.kind == "yarn" and not mla else "rope"


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return bool(given) == bool(wanted)
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        return math.isclose(given, wanted, rel_tol=1e-6)
    if isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        return list(given) == list(wanted)
    return given == wanted


def _means_absent(name: str, given: Any, model: Architecture) -> bool:
    """Return whether the value is another way to write that the model lacks this feature.

    One group of experts is no grouping, and YaRN's factors of the softmax need YaRN.
    """
    if name in ("moe_router_num_groups", "moe_router_group_topk"):
        return given == 1 and model.fields[name] is None
    return name in ("mscale", "mscale_all_dim") and model.fields.get("rope_type") == "rope"


def _flag_fields(args: Args) -> dict[str, Any]:
    """Return the fields set by flags, without those that layout or precision determine."""
    given = flag_fields(args, TransformerConfig)
    fields = {name: value for name, value in given.items() if name not in _NOT_FROM_FLAGS}
    if not has_te():
        fields = {name: value for name, value in fields.items() if name not in FUSIONS}
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if len(fields.get(name, ())) == 1:
            (fields[name],) = fields[name]
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[fields["attention_backend"]]
    return fields


def _layout(args: Args, model: Architecture) -> dict[str, Any]:
    tp = args.tensor_model_parallel_size
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual_stages(args, model.fields["num_layers"]),
        "context_parallel_size": args.context_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "sequence_parallel": bool(args.sequence_parallel) and tp > 1,
    }


def _check_expert_biases(model: Architecture, args: Args) -> None:
    etp = args.expert_tensor_parallel_size
    if model.fields.get("num_moe_experts") and model.fields["add_bias_linear"] and etp > 1:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp}: every rank would add the experts' biases; use "
            "--expert-tensor-parallel-size 1, with --expert-model-parallel-size 2 or more"
        )


def virtual_stages(args: Args, num_layers: int) -> int | None:
    """Return the model chunks per pipeline rank, or None without virtual pipeline stages."""
    stages = args.virtual_pipeline_model_parallel_size or args.num_virtual_stages_per_pipeline_rank
    per_stage, pp = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    if per_stage is not None:
        if num_layers % (pp * per_stage):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} x "
                f"--pipeline-model-parallel-size {pp} does not divide the {num_layers} layers"
            )
        stages = num_layers // pp // per_stage
    return stages if stages and stages > 1 else None


def _precision(args: Args) -> dict[str, Any]:
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    return {"bf16": args.precision == "bf16", "params_dtype": dtype, "pipeline_dtype": dtype}


# Defaults for RL; flags override them.
_DEFAULTS: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
    "moe_router_bias_update_rate": 0.0,  # no bias updates: only gradients change routing
    "deallocate_pipeline_outputs": False,
}

# Determined by the precision, the layout or the loss, whose flag has the same name.
_NOT_FROM_FLAGS = {
    "fp16",
    "bf16",
    "params_dtype",
    "pipeline_dtype",
    "transformer_impl",
    "calculate_per_token_loss",
    "virtual_pipeline_model_parallel_size",
    "moe_layer_freq",
    "experimental_attention_variant",
    "multi_latent_attention",
    "moe_grouped_gemm",  # experts are always grouped, with or without TransformerEngine
}
