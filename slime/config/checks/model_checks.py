"""Check Megatron's flags against the model's config.json and the number of GPUs."""

from __future__ import annotations

import math
from typing import Any

from slime.config.checks.file_checks import is_dense, num_experts, read_hf_config, read_quantization
from slime.config.checks.megatron_support import asks_for_something, check_megatron_flags
from slime.config.checks.model_types import (
    MTP,
    check_delta_layout,
    check_fsdp_type,
    check_model_type,
    check_rope,
    family_of,
)
from slime.config.checks.precision_checks import check_fp8, check_kernels, check_precision_aware
from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of
from slime.config.flags.train import MUON
from slime.config.installed import is_installed
from slime.config.lora import adapted_experts
from slime.core.errors import ConfigError

# Megatron's flag -> its keys in config.json, the first present one counts
_CONFIG_KEYS = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "rotary_base": ("rope_theta",),
    "vocab_size": ("vocab_size",),
}
_NOT_WITH_MLA = ("num_query_groups", "kv_channels")


def check_model(draft: Draft) -> None:
    if draft["train_backend"] != "megatron":
        config = read_hf_config(draft)
        check_fsdp_type(draft, config)
        check_fsdp_experts(draft, config)
        return
    check_megatron_flags(draft)
    config = _flat(read_hf_config(draft))
    if config.get("model_type") and not draft["custom_model_provider_path"]:
        check_model_type(config["model_type"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        check_rope(config["model_type"], rope.get("rope_type") or rope.get("type") or "default")
    check_spec(draft, config)
    _warn_about_name(draft, config.get("model_type"))
    check_against_config(draft, config)
    check_expert_flags(draft, config)
    check_parallel(draft, config)
    check_delta_layout(draft, config)
    check_mtp(draft, config)
    check_precision_aware(draft)
    check_fp8(draft, config)
    check_recompute(draft)
    check_hooks(draft)
    check_packages(draft)
    check_kernels(draft)
    check_replay(draft, config)


def check_fsdp_experts(draft: Draft, config: dict[str, Any]) -> None:
    """Check --expert-model-parallel-size with FSDP, whose ranks each store equally many experts."""
    ep, gpus = draft["expert_model_parallel_size"] or 1, draft.num_training_gpus
    if ep == 1:
        return
    experts = num_experts(config)
    if is_dense(config):
        raise ConfigError(
            f"--expert-model-parallel-size {ep}: the model of --hf-checkpoint has no experts: remove "
            "it"
        )
    if gpus % ep:
        raise ConfigError(
            f"--expert-model-parallel-size {ep} does not divide the {gpus} training GPUs: choose one "
            "that does"
        )
    if experts is not None and experts % gpus:
        raise ConfigError(
            f"--expert-model-parallel-size {ep} with --train-backend fsdp: the {experts} experts of a layer "
            f"are not a multiple of the {gpus} training GPUs: remove it, or train on another number of GPUs"
        )
    if adapted_experts(draft):
        raise ConfigError(
            f"--expert-model-parallel-size {ep} with --train-backend fsdp: experts with adapters are not "
            "spread over ranks: remove it, or remove experts from --lora-target-modules"
        )
    in_fp8 = not draft["ref_load"] and read_quantization(draft).get("weight_block_size")
    if draft["lora_rank"] and in_fp8:
        raise ConfigError(
            f"--expert-model-parallel-size {ep} with --train-backend fsdp and --lora-rank: experts that stay "
            "in FP8 are not spread over ranks: remove it, or give bf16 weights with --ref-load"
        )
    if config.get("model_type") == "gpt_oss":
        raise ConfigError(
            f"--expert-model-parallel-size {ep} with --train-backend fsdp: experts with biases are not "
            "spread over ranks: remove it, or use --train-backend megatron"
        )


def check_spec(draft: Draft, config: dict[str, Any]) -> None:
    """Check that --spec MODULE FUNCTION names the family of the model, whose layers config.json describes.

    The family is the last name of the module: slime_plugins.models.glm4 get_glm_spec is for glm4.
    """
    given, model_type = draft["spec"], config.get("model_type")
    if not given or not model_type:
        return
    if len(given) > 2:
        raise ConfigError(f"--spec takes a module and a function, not {len(given)} values")
    family = given[0].split(".")[-1]
    if not model_type.startswith(family):
        raise ConfigError(
            f"--spec {' '.join(given)}: the layers are built from config.json of --hf-checkpoint, whose "
            f"model_type is {model_type}: remove it, or build the model in --custom-model-provider-path"
        )


def _warn_about_name(draft: Draft, model_type: str | None) -> None:
    """Warn if --model-name names another type than config.json, which decides the type."""
    name = draft["model_name"]
    if name and model_type and _letters(family_of(model_type)) not in _letters(name):
        draft.warn(
            f"--model-name {name} only names the run's folder: the model is of type {model_type}, as "
            "config.json of --hf-checkpoint says"
        )


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def check_against_config(draft: Draft, config: dict[str, Any]) -> None:
    """Check that flags of the architecture agree with config.json; flags not given follow it."""
    for name, keys in _CONFIG_KEYS.items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is None or (draft["multi_latent_attention"] and name in _NOT_WITH_MLA):
            continue
        value = draft[name] if draft.given(name) else None
        if value is not None and not math.isclose(value, config[key], rel_tol=1e-6):
            raise ConfigError(
                f"{option_of(name)} {value:g} disagrees with {key} {config[key]:g} in config.json "
                f"of --hf-checkpoint: use {option_of(name)} {config[key]:g}"
            )
    if config.get("tie_word_embeddings") and draft["untie_embeddings_and_output_weights"]:
        raise ConfigError(
            "config.json of --hf-checkpoint says tie_word_embeddings true: remove "
            "--untie-embeddings-and-output-weights"
        )


def check_expert_flags(draft: Draft, config: dict[str, Any]) -> None:
    for flag in draft.given_flags() if is_dense(config) else ():
        if flag.name.startswith("moe_") and asks_for_something(flag.name, draft[flag.name]):
            raise ConfigError(
                f"{flag.option}: the model of --hf-checkpoint has no experts: remove it"
            )


def check_parallel(draft: Draft, config: dict[str, Any]) -> None:
    """Check that TP x PP x CP x DP = GPUs; expert parallelism divides the same GPUs."""
    gpus = draft.num_training_gpus
    axes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    tp, pp, cp, ep, etp = (draft[f"{axis}_parallel_size"] for axis in axes)
    if gpus % (tp * pp * cp):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
            f"--context-parallel-size {cp} = {tp * pp * cp} does not divide the {gpus} training GPUs: "
            "lower one of them, or train on more GPUs (experts need none of their own)"
        )
    if gpus % (ep * etp * pp):
        raise ConfigError(
            f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp} x "
            f"--pipeline-model-parallel-size {pp} = {ep * etp * pp} does not divide the {gpus} training "
            "GPUs: lower one of them"
        )
    if ep == 1 and etp != tp and num_experts(config) is not None:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} needs "
            "--expert-model-parallel-size 2 or more, as megatron-core reduces the experts' gradients "
            "only then: remove --expert-tensor-parallel-size or raise that"
        )
    _check_divides(draft, config, "num_attention_heads", "tensor_model_parallel_size")
    _check_divides(draft, config, "num_experts", "expert_model_parallel_size")
    _check_key_heads(draft, config)
    _check_layers(draft, config)
    if draft["sequence_parallel"] and tp == 1:
        draft.warn(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: it splits sequences over "
            "tensor ranks"
        )
    experts = draft["num_experts"] or num_experts(config)
    if tp > 1 and experts is not None and not draft["sequence_parallel"]:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} with experts needs --sequence-parallel: add it"
        )
    if ep > 1 and experts is None and is_dense(config):
        raise ConfigError(
            f"--expert-model-parallel-size {ep}: the model of --hf-checkpoint has no experts: remove "
            "it"
        )


def check_mtp(draft: Draft, config: dict[str, Any]) -> None:
    """Check the flags of multi-token-prediction (MTP) layers against the model and the layout."""
    layers, trains = draft["mtp_num_layers"], draft["enable_mtp_training"]
    if draft.given("mtp_loss_scaling_factor") and not trains:
        raise ConfigError(
            "--mtp-loss-scaling-factor weighs the loss of --enable-mtp-training: add that, or remove it"
        )
    if not layers:
        return
    held = _mtp_layers(config)
    if not 0 < layers <= held and _found(config, "num_layers") is not None:
        raise ConfigError(
            f"--mtp-num-layers {layers}: the model of --hf-checkpoint has {held} MTP layers "
            "(num_nextn_predict_layers in config.json): "
            + (f"use {held}, or remove it" if held else "remove it")
        )
    if trains:
        _check_mtp_layout(draft, config)
    else:
        draft.warn(
            "--mtp-num-layers: MTP layers keep their weights and are saved unchanged; "
            "--enable-mtp-training trains them"
        )


def _mtp_layers(config: dict[str, Any]) -> int:
    """Return the number of MTP layers in the checkpoint; MiMo has one even if config.json has no count."""
    kind = config.get("model_type")
    if kind not in MTP:
        return 0
    return config.get("num_nextn_predict_layers", 1 if kind == "mimo" else 0) or 0


def _check_mtp_layout(draft: Draft, config: dict[str, Any]) -> None:
    pp = draft["pipeline_model_parallel_size"]
    for name, why in _NOT_WITH_MTP.items():
        if draft[name]:
            raise ConfigError(f"--enable-mtp-training with {option_of(name)}: {why}: remove one")
    if pp > 1 and config.get("tie_word_embeddings"):
        raise ConfigError(
            f"--enable-mtp-training with --pipeline-model-parallel-size {pp}: the last stage would hold "
            "the tied embedding twice: use --pipeline-model-parallel-size 1"
        )


_NOT_WITH_MTP = {
    "freeze_params_name_list": "its names are those of the layers without MTP",
    "only_train_params_name_list": "its names are those of the layers without MTP",
    "custom_model_provider_path": "the function builds the model without MTP layers",
    "pipeline_model_parallel_layout": "MTP layers are on the last stage, behind its decoder layers",
    "fp8_format": "MTP layers are trained in bf16 or fp32",
}


def check_recompute(draft: Draft) -> None:
    if draft["recompute_granularity"] != "selective":
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if draft[name] is not None:
            raise ConfigError(
                f"{option_of(name)} belongs to --recompute-granularity full: remove it, or use full"
            )


def check_hooks(draft: Draft) -> None:
    """Refuse hooks that need whole samples with context parallelism, where no rank holds them."""
    cp = draft["context_parallel_size"]
    if cp > 1 and draft["custom_loss_function_path"] is not None:
        raise ConfigError(
            f"--custom-loss-function-path needs whole samples and --context-parallel-size {cp} splits them: "
            "remove one of them"
        )


def check_replay(draft: Draft, config: dict[str, Any]) -> None:
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if not draft[name]:
            continue
        if draft["qkv_format"] == "bshd":
            raise ConfigError(f"{option_of(name)} needs packed samples: --qkv-format thd")
        if is_dense(config):
            raise ConfigError(f"{option_of(name)}: the model of --hf-checkpoint has no experts")
        _check_replayed_experts(draft, name)


def _check_replayed_experts(draft: Draft, name: str) -> None:
    """Refuse recomputing the routers alone with pipeline stages: they cannot tell their micro-batch."""
    selective = draft["recompute_granularity"] == "selective"
    again = selective and "moe" in (draft["recompute_modules"] or ())
    pp = draft["pipeline_model_parallel_size"]
    if (again or draft["moe_layer_recompute"]) and pp > 1:
        option = "--recompute-modules moe" if again else "--moe-layer-recompute"
        raise ConfigError(
            f"{option_of(name)} with {option} and --pipeline-model-parallel-size {pp}: several "
            "micro-batches are in flight when experts are recomputed: use --recompute-granularity "
            "full"
        )


def check_packages(draft: Draft) -> None:
    if not is_installed("megatron"):
        draft.lacking("--train-backend megatron needs megatron-core: pip install 'slime[megatron]'")


def _check_key_heads(draft: Draft, config: dict[str, Any]) -> None:
    tp, heads = draft["tensor_model_parallel_size"], _found(config, "num_query_groups")
    if heads is None or draft["multi_latent_attention"] or config.get("kv_lora_rank"):
        return
    if MUON.holds(draft) and draft["muon_split_qkv"] is not False and tp > heads:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} splits the {heads} key heads of the model, and --optimizer "
            f"{draft['optimizer']} orthogonalises queries, keys and values separately: add --muon-no-split-qkv"
        )
    if heads % tp and tp % heads:
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} and the {heads} key heads of the model: one must divide "
            "the other"
        )


def _check_layers(draft: Draft, config: dict[str, Any]) -> None:
    layers = _found(config, "num_layers") if draft["num_layers"] is None else draft["num_layers"]
    pp = draft["pipeline_model_parallel_size"]
    uneven = any(draft[f"num_layers_in_{stage}_pipeline_stage"] for stage in ("first", "last"))
    per_stage = draft["num_layers_per_virtual_pipeline_stage"]
    if per_stage and pp == 1:
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} splits the stages of a pipeline and "
            "--pipeline-model-parallel-size is 1: remove one or raise the other"
        )
    if layers is None or pp == 1 or uneven or draft["pipeline_model_parallel_layout"]:
        return
    if layers % pp:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp} does not divide the {layers} layers: choose one that "
            "does, or give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    if per_stage and layers % (pp * per_stage):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} x --pipeline-model-parallel-size {pp} "
            f"= {pp * per_stage} does not divide the {layers} layers: choose one that does"
        )


def _found(config: dict[str, Any], name: str) -> Any:
    found = (config.get(key) for key in _CONFIG_KEYS[name])
    return next((value for value in found if isinstance(value, (int, float))), None)


def _check_divides(draft: Draft, config: dict[str, Any], name: str, size: str) -> None:
    count = draft[name] if draft[name] is not None else _found(config, name)
    if count is not None and count % draft[size]:
        raise ConfigError(
            f"{option_of(size)} {draft[size]} does not divide {option_of(name)} {count}: choose one "
            "that does"
        )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with rope_theta at the top; newer configs have it in rope_parameters."""
    rope = config.get("rope_parameters") or {}
    return {**config, "rope_theta": config.get("rope_theta") or rope.get("rope_theta")}
