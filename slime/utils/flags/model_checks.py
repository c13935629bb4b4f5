"""Megatron's flags against the model's config.json and against the GPUs."""

from __future__ import annotations

import math
from typing import Any

from slime.utils.errors import ConfigError
from slime.utils.flags.draft import Draft
from slime.utils.flags.gpus import is_installed
from slime.utils.flags.hf_config import read_hf_config
from slime.utils.flags.spec import option_of

# Megatron's flag -> its names in config.json, the first one that is there counts
_SAME = {
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
        return
    config = _flat(read_hf_config(draft))
    check_against_config(draft, config)
    check_parallel(draft, config)
    check_precision_aware(draft)


def check_against_config(draft: Draft, config: dict[str, Any]) -> None:
    """A flag that was given says what the config does; what was not given follows from it."""
    for name, keys in _SAME.items():
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
            "config.json of --hf-checkpoint says tie_word_embeddings true: leave out "
            "--untie-embeddings-and-output-weights"
        )


def check_parallel(draft: Draft, config: dict[str, Any]) -> None:
    """TP x PP x CP x DP = GPUs; experts are spread inside that, not on top of it."""
    gpus = draft["actor_num_nodes"] * draft["actor_num_gpus_per_node"]
    tp, pp, cp = (draft[f"{axis}_parallel_size"] for axis in _AXES)
    if gpus % (tp * pp * cp):
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
            f"--context-parallel-size {cp} = {tp * pp * cp} does not divide the {gpus} training GPUs"
        )
    ep = draft["expert_model_parallel_size"]
    etp = draft["expert_tensor_parallel_size"]
    if gpus % (ep * etp * pp):
        raise ConfigError(
            f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp} x "
            f"--pipeline-model-parallel-size {pp} = {ep * etp * pp} does not divide the {gpus} training "
            "GPUs"
        )
    _check_divides(draft, config, "num_attention_heads", "tensor_model_parallel_size")
    _check_divides(draft, config, "num_experts", "expert_model_parallel_size")


def check_precision_aware(draft: Draft) -> None:
    if not draft["use_precision_aware_optimizer"]:
        return
    if not draft["use_distributed_optimizer"]:
        raise ConfigError(
            "--use-precision-aware-optimizer needs the distributed optimizer: leave out "
            "--no-use-distributed-optimizer"
        )
    if not draft["optimizer_cpu_offload"] and not is_installed("transformer_engine"):
        draft.lacking(
            "--use-precision-aware-optimizer needs TransformerEngine's FusedAdam unless "
            "--optimizer-cpu-offload is set: install transformer-engine or add that flag"
        )


_AXES = ("tensor_model", "pipeline_model", "context")


def _check_divides(draft: Draft, config: dict[str, Any], name: str, size: str) -> None:
    found = next((config[key] for key in _SAME[name] if config.get(key) is not None), None)
    count = draft[name] if draft[name] is not None else found
    if count is not None and count % draft[size]:
        raise ConfigError(
            f"{option_of(size)} {draft[size]} does not divide {option_of(name)} {count}: choose one "
            "that does"
        )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Newer configs keep rope_theta among the rope parameters."""
    rope = config.get("rope_parameters") or {}
    return {**config, "rope_theta": config.get("rope_theta") or rope.get("rope_theta")}
